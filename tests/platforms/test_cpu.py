"""What verl's `cpu` platform answers."""

import torch

from rhyme_verl.platforms.cpu import CpuPlatform


def test_it_answers_whatever_verl_asks_of_a_device(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    platform = CpuPlatform()
    assert platform.device_name == platform.vendor_name == "cpu" and platform.device_count() == 1
    assert platform.is_platform_available(use_smi_check=True) and not platform.is_ipc_supported()
    assert torch.ones(1, device=platform.current_device()).device.type == "cpu"
    assert platform.get_device_capability(0) == (None, None)
    assert platform.communication_backend_name() == "gloo"
    assert platform.ray_resource_options(0.5) == {"num_gpus": 0.5} and platform.ray_noset_envvars() == []
    assert platform.get_device_uuid(0) == "GPU3"
    platform.set_device(0)
    platform.synchronize(device_index=0)
    platform.set_allocator_settings("expandable_segments:True")
    platform.empty_cache()
    platform.profiler_start()
    platform.profiler_stop()
    assert platform.cudart() is None
    for _ in range(2):
        with platform.nvtx_range(msg="step"):
            pass
    drawn = []
    for seed in (platform.manual_seed, platform.manual_seed_all):
        seed(7)
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]
    available, total = platform.device_module.mem_get_info()
    assert 0 < available <= total
