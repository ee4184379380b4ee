"""A worker extension that lets its process schedule asynchronously; vLLM imports it before the model runner."""

from rhyme_verl.integration.worker_extension import RhymeCpuWorkerExtension
from tools import cpu_async

cpu_async.install()


class AsyncWorkerExtension(RhymeCpuWorkerExtension):
    def rhyme_is_asynchronous(self) -> bool:
        return self.model_runner.use_async_scheduling and type(self.model_runner.drafter).__name__ == "AsyncProposer"
