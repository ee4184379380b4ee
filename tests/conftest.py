"""Environment of Ray and of vLLM's CPU engine, set before anything imports them."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    RAY_ADDRESS="local",  # a Ray of its own for each test and job, whatever else runs on the machine
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: tests reach its proposer
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
