"""Which CUDA graphs an engine with drafts gets. Graphs need a GPU: here, what vLLM says about attention is replaced."""

import pytest
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.histospec import cuda_graphs
from tests.helpers.engine import engine

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


def support(monkeypatch, layer, level):
    builder = layer.get_attn_backend().get_builder_cls()
    monkeypatch.setattr(builder, "get_cudagraph_support", classmethod(lambda cls, config, spec: level))


def test_every_layer_is_asked(config, layers, monkeypatch):
    assert len(layers) > 1
    assert not cuda_graphs.takes_unequal_rows(config), "vLLM's attention for CPUs has no graphs"
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
        ("FULL_AND_PIECEWISE", AttentionCGSupport.UNIFORM_BATCH, "PIECEWISE"),
        ("FULL", AttentionCGSupport.ALWAYS, "FULL"),
        ("FULL", AttentionCGSupport.UNIFORM_BATCH, "PIECEWISE"),
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
    monkeypatch.setattr(compilation, "mode", CompilationMode.VLLM_COMPILE)
    monkeypatch.setattr(compilation, "splitting_ops", list(compilation._attention_ops))
    support(monkeypatch, layers[0], level)
    cuda_graphs.choose_graphs(config)
    assert compilation.cudagraph_mode is CUDAGraphMode[chosen]


def test_a_model_that_is_not_compiled_in_pieces_keeps_its_mode(config, monkeypatch):
    compilation = config.compilation_config
    monkeypatch.setattr(compilation, "cudagraph_mode", CUDAGraphMode.FULL)
    cuda_graphs.choose_graphs(config)
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL, "vLLM decides"
