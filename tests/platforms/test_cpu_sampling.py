"""The remedy for vLLM's CPU sampling fault: the fault is there, the remedy is exact, and it is loaded by vLLM."""

import pytest
import torch

from rhyme_verl.platforms import cpu_sampling

pytestmark = pytest.mark.engine


@pytest.fixture
def sampler():
    """vLLM's rejection sampler; whatever a test puts into it is taken out again."""
    import vllm._custom_ops  # noqa: F401  loads the operators, as built for this processor
    from vllm.v1.sample import rejection_sampler

    before = rejection_sampler.expand_batch_to_tokens
    yield rejection_sampler
    rejection_sampler.expand_batch_to_tokens = before


def test_the_check_notices_the_fault_and_the_remedy(sampler):
    def with_vllms_own_kernel(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        from vllm.utils.cpu_triton_utils import _expand_kernel_impl

        expanded = x.new_zeros(num_tokens)
        _expand_kernel_impl(expanded, x, cu_num_tokens, replace_from, replace_to)
        return expanded

    sampler.expand_batch_to_tokens = with_vllms_own_kernel
    assert not cpu_sampling.expand_kernel_is_exact()
    cpu_sampling.register()
    assert cpu_sampling.expand_kernel_is_exact()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expands_floats_and_integers_with_replacement(sampler, dtype):
    cpu_sampling.register()
    values = torch.tensor([3, 0, 5, 7], dtype=dtype)
    expanded = sampler.expand_batch_to_tokens(values, torch.tensor([2, 3, 3, 6]), 6, replace_from=0, replace_to=9)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [3, 3, 9, 7, 7, 7]


def test_vllm_loads_the_remedy_as_a_plugin():
    from importlib.metadata import entry_points

    names = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    assert names["rhyme_cpu_sampling"] == "rhyme_verl.platforms.cpu_sampling:register"
