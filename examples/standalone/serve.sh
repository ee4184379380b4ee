#!/usr/bin/env bash
# vLLM's own server with HistoSpec as its drafter, no verl: serve.sh MODEL [arguments of `vllm serve`]
# It drafts once a client has called `rhyme_bind` (client.py does). vLLM offers that call in its developer mode only,
# which lets anybody who reaches the port run the engine's methods: so the server listens on this machine alone.
set -euo pipefail
model=${1:?give a model folder or a hub name}
shift
export VLLM_SERVER_DEV_MODE=1
exec vllm serve "$model" --host 127.0.0.1 \
  --speculative-config '{"method": "custom_class", "model": "rhyme_verl.histospec.proposer.RhymeProposer", "num_speculative_tokens": 24}' \
  --worker-extension-cls rhyme_verl.histospec.worker_access.HistoSpecWorker \
  --additional-config '{"rhyme": {"spec": {"max_draft_tokens": 24}}}' \
  "$@"
