"""The GPU benchmark's model folders have the published models' sizes and a tokenizer that loads."""

import pytest
import torch

from benchmarks.engines.shapes import write


@pytest.mark.parametrize(("name", "parameters"), [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512)])
def test_a_shape_has_the_published_number_of_parameters(tmp_path, name, parameters):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = write(tmp_path, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert AutoTokenizer.from_pretrained(folder).decode([155]).strip().isalpha()
