#!/usr/bin/env bash
# vLLM's own server with HistoSpec as its drafter, no verl: serve.sh MODEL [arguments of `vllm serve`]
# It drafts once a client has called `rhyme_bind`, as client.py does. vLLM offers this call in developer mode only,
# in which any client that reaches the port can call the engine's methods; so the server listens on localhost only.
set -euo pipefail
model=${1:?give a model folder or a hub name}
shift
export VLLM_SERVER_DEV_MODE=1
exec vllm serve "$model" --host 127.0.0.1 \
  --speculative-config '{"method": "custom_class", "model": "rhyme_verl.histospec.proposer.RhymeProposer", "num_speculative_tokens": 24, "num_speculative_tokens_per_batch_size": [[1, 1, 24]]}' \
  --worker-extension-cls rhyme_verl.histospec.worker_access.HistoSpecWorker \
  --additional-config '{"rhyme": {"spec": {"max_draft_tokens": 24}}}' \
  "$@"
