"""Running verl and vLLM without a GPU.

`cpu` is the platform object verl asks for device questions, `cpu_sampling` fixes vLLM's CPU speculative sampling,
`cpu_worker` places vLLM's CPU worker and carries weights into it, `cpu_checkpoint_engine` carries them to replicas that
are apart from the trainer. All of it is inert unless `VERL_PLATFORM=cpu` (the first), vLLM itself runs on its CPU build
(the next two), or a job names it (the last).
"""
