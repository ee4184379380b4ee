"""Runs verl and vLLM without a GPU.

`cpu` is the platform object for verl, active with `VERL_PLATFORM=cpu`. `cpu_sampling` fixes speculative sampling and
`cpu_worker` pins workers to cores and loads weights into them, both on vLLM's CPU build only.
"""
