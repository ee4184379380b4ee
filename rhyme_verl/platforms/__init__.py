"""Running verl and vLLM without a GPU.

`cpu` is the platform object verl asks for device questions, `cpu_sampling` mends vLLM's CPU speculative sampling,
`cpu_worker` carries weights into vLLM's CPU worker. All of it is inert unless `VERL_PLATFORM=cpu` (the first) or vLLM
itself runs on its CPU build (the others).
"""
