"""Which CUDA graphs an engine with drafts gets. Graphs need a GPU: here, what vLLM says about attention is replaced."""

import pytest
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.histospec import cuda_graphs
from tests.helpers.engine import engine, runner_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def config():
    """The config of an engine whose model is loaded."""
    with engine(SHIPPED_POLICY) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        yield worker.vllm_config


@pytest.fixture
def layers(config):
    names = config.compilation_config.static_forward_context
    return [layer for layer in names.values() if hasattr(layer, "get_attn_backend")]


def support(monkeypatch, layer, level, name="FLASH_ATTN"):
    backend = layer.get_attn_backend()
    monkeypatch.setattr(backend, "get_name", staticmethod(lambda: name))
    support_of = classmethod(lambda cls, config, spec: level)
    monkeypatch.setattr(backend.get_builder_cls(), "get_cudagraph_support", support_of)


def test_every_layer_is_asked(config, layers, monkeypatch):
    assert len(layers) > 1
    assert not cuda_graphs.takes_unequal_rows(config), "vLLM's attention for CPUs has no graphs"
    support(monkeypatch, layers[0], AttentionCGSupport.ALWAYS, "TRITON_ATTN")
    assert not cuda_graphs.takes_unequal_rows(config), "its graphs lack the kernel for few long answers"
    support(monkeypatch, layers[0], AttentionCGSupport.ALWAYS)
    assert cuda_graphs.takes_unequal_rows(config)
    one = type("Other", (layers[0].get_attn_backend(),), {})
    builder = type("Builder", (one.get_builder_cls(),), {"get_cudagraph_support": lambda *_: AttentionCGSupport.NEVER})
    monkeypatch.setattr(one, "get_builder_cls", staticmethod(lambda: builder))
    monkeypatch.setattr(layers[1], "get_attn_backend", lambda: one)
    assert not cuda_graphs.takes_unequal_rows(config)


@pytest.mark.parametrize(
    ("given", "level", "chosen"),
    [
        ("FULL_AND_PIECEWISE", AttentionCGSupport.ALWAYS, "FULL"),
        ("FULL_AND_PIECEWISE", AttentionCGSupport.UNIFORM_BATCH, "FULL_AND_PIECEWISE"),
        ("FULL", AttentionCGSupport.UNIFORM_BATCH, "FULL"),
        ("PIECEWISE", AttentionCGSupport.ALWAYS, "PIECEWISE"),
        ("FULL_DECODE_ONLY", AttentionCGSupport.ALWAYS, "FULL_DECODE_ONLY"),
        ("NONE", AttentionCGSupport.ALWAYS, "NONE"),
    ],
)
def test_graphs_are_full_where_attention_takes_drafts_of_different_lengths(
    config, layers, monkeypatch, given, level, chosen
):
    compilation = config.compilation_config
    monkeypatch.setattr(compilation, "cudagraph_mode", CUDAGraphMode[given])
    support(monkeypatch, layers[0], level)
    cuda_graphs.choose_graphs(config)
    assert compilation.cudagraph_mode is CUDAGraphMode[chosen]


@pytest.fixture(scope="module")
def drafting():
    """The model runner of an engine that drafts up to 6 tokens."""
    with engine(SHIPPED_POLICY, {}) as llm:
        yield runner_of(llm)


def resolve(runner, monkeypatch, mode, level, has_drafts=True):
    """Let vLLM resolve a mode, and prepare the choice of graphs, for an attention backend with this support."""
    compilation = runner.compilation_config
    settings = {
        "cudagraph_mode": CUDAGraphMode[mode],
        "mode": CompilationMode.VLLM_COMPILE,
        "splitting_ops": list(compilation._attention_ops),
        "cudagraph_capture_sizes": list(SIZES),
        "max_cudagraph_capture_size": SIZES[-1],
    }
    for name, value in settings.items():
        monkeypatch.setattr(compilation, name, value)
    names = compilation.static_forward_context.values()
    layer = next(layer for layer in names if hasattr(layer, "get_attn_backend"))
    support(monkeypatch, layer, level)
    resolved = type(runner)._check_and_update_cudagraph_mode
    arguments = [{layer.get_attn_backend()}], runner.kv_cache_config.kv_cache_groups
    if has_drafts:
        resolved(runner, *arguments)
    else:
        resolved.__wrapped__(runner, *arguments)
    return compilation.cudagraph_capture_sizes


SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("mode", "level", "of_mixed_steps"),
    [
        ("FULL_AND_PIECEWISE", AttentionCGSupport.UNIFORM_BATCH, CUDAGraphMode.PIECEWISE),
        ("FULL_AND_PIECEWISE", AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, CUDAGraphMode.PIECEWISE),
        ("FULL", AttentionCGSupport.ALWAYS, CUDAGraphMode.FULL),
    ],
)
def test_undrafted_steps_have_the_full_graphs_of_stock_vllm(drafting, monkeypatch, mode, level, of_mixed_steps):
    assert resolve(drafting, monkeypatch, mode, level) == list(SIZES)
    dispatch = drafting.cudagraph_dispatcher.dispatch
    for tokens, padded in ((1, 1), (3, 4), (16, 16)):
        chosen, shape = dispatch(tokens, uniform_decode=True)
        assert (chosen, shape.num_tokens) == (CUDAGraphMode.FULL, padded)
        chosen, shape = dispatch(tokens)
        assert (chosen, shape.num_tokens) == (of_mixed_steps, padded)
    assert dispatch(17)[0] is CUDAGraphMode.NONE
    assert drafting._is_uniform_decode(1, drafting.uniform_decode_query_len, 3, 3)
    assert not drafting._is_uniform_decode(7, drafting.uniform_decode_query_len, 21, 3)


def test_vllm_alone_rounds_sizes_to_whole_drafts(drafting, monkeypatch):
    """What `capture_undrafted_steps` is for. With the default of 24 draft tokens, these sizes would be an error."""
    for holder in (drafting, drafting.cudagraph_dispatcher):
        monkeypatch.setattr(holder, "uniform_decode_query_len", 7)
    sizes = resolve(drafting, monkeypatch, "FULL", AttentionCGSupport.ALWAYS, has_drafts=False)
    assert sizes == [7, 14]
    with pytest.raises(RuntimeError, match=r"did not take effect .*spec.enabled=false"):
        cuda_graphs.check_captured(drafting)


def test_a_runner_without_the_step_or_the_length_is_refused(drafting, monkeypatch):
    runner_class = next(base for base in type(drafting).__mro__ if cuda_graphs.RESOLVE in vars(base))
    with monkeypatch.context() as patched:
        patched.delattr(drafting.cudagraph_dispatcher, "uniform_decode_query_len")
        with pytest.raises(RuntimeError, match=r"CudagraphDispatcher has no uniform_decode_query_len: install a vLLM"):
            resolve(drafting, monkeypatch, "NONE", AttentionCGSupport.ALWAYS)
    monkeypatch.delattr(runner_class, cuda_graphs.RESOLVE)
    with pytest.raises(RuntimeError, match="has no _check_and_update_cudagraph_mode: install a vLLM"):
        cuda_graphs.capture_undrafted_steps(type(drafting.drafter))
