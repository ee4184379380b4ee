"""verl's table of groups, which its trainer and its agent-loop workers keep in TransferQueue."""

from __future__ import annotations

from collections.abc import Sequence, Set

import transfer_queue as tq


class TransferQueueTable:
    """The router's access to it: a `rhyme_verl.histopipe.messages.GroupTable`."""

    def available(self, published: Set[str]) -> set[str]:
        """Return the training groups that the trainer has not taken: it removes those that it takes or filters."""
        tq.init()
        tags = (tq.kv_list("train") or {}).get("train", {})
        finished = {uid for uid, tag in tags.items() if tag.get("is_prompt", False) and tag.get("status") == "finished"}
        return finished | {uid for uid in published if tags.get(uid, {}).get("status", "failure") != "failure"}

    def mark_failed(self, uids: Sequence[str]) -> None:
        """Mark groups as failed, as verl's worker does; the trainer replaces them or continues without them."""
        tq.init()
        for partition, tags in (tq.kv_list() or {}).items():
            known = [uid for uid in uids if uid in tags]
            if known:
                tq.kv_batch_put(keys=known, partition_id=partition, tags=[{"status": "failure"} for _ in known])
