"""rhyme_verl's own files in a job's config, as an OmegaConf interpolation that every node resolves for itself.

verl sends the driver's config to other nodes, where rhyme_verl may be installed in another folder. The interpolation
reaches them as it is, because verl resolves the config where its trainer runs, after `import verl`.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

_RESOLVER = "rhyme_verl.file"


def package_file(name: str) -> str:
    """Return the config value that stands for the path of a file, given relative to `rhyme_verl/`."""
    return f"${{{_RESOLVER}:{name}}}"


def register() -> None:
    """Make this process resolve these values. Idempotent."""
    OmegaConf.register_new_resolver(_RESOLVER, lambda name: str(Path(__file__).parents[1] / name), replace=True)
