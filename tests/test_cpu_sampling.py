"""The remedy for vLLM's CPU sampling fault: the fault is there, the remedy is exact, and it is loaded by vLLM."""

import pytest
import torch

from rhyme_verl.platforms import cpu_sampling

pytestmark = pytest.mark.engine


@pytest.fixture
def original_kernel():
    """vLLM's own kernel, in place for one test."""
    import vllm._C  # noqa: F401  the operators behind it
    from vllm.utils import cpu_triton_utils

    mended = cpu_triton_utils.expand_kernel.func
    cpu_triton_utils.expand_kernel.func = cpu_triton_utils._expand_kernel_impl
    yield
    cpu_triton_utils.expand_kernel.func = mended


def test_the_check_notices_the_fault_and_the_remedy(original_kernel):
    assert not cpu_sampling.expand_kernel_is_exact()
    cpu_sampling.register()
    assert cpu_sampling.expand_kernel_is_exact()


def test_expands_floats_and_integers_with_replacement():
    from vllm.utils.cpu_triton_utils import expand_kernel

    cpu_sampling.register()
    for dtype in (torch.float32, torch.int32, torch.int64):
        expanded = torch.empty(6, dtype=dtype)
        values = torch.tensor([3, 0, 5, 7], dtype=dtype)
        expand_kernel[(4,)](expanded, values, torch.tensor([2, 3, 3, 6]), 0, 9, MAX_NUM_TOKENS=128)
        assert expanded.tolist() == [3, 3, 9, 7, 7, 7]


def test_vllm_loads_the_remedy_as_a_plugin():
    from importlib.metadata import entry_points

    names = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert names["rhyme_cpu_sampling"] == "rhyme_verl.platforms.cpu_sampling:register"
