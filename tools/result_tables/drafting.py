"""Tables of replayed drafters."""

from __future__ import annotations

from tools.result_tables.markdown import head, result_of, row_of, with_machine


def replayed() -> str:
    """Tokens per second of replayed drafters relative to no drafts, and to the best setting of suffix decoding."""
    result = result_of("drafter")
    texts = {"gsm8k": "GSM8K solutions", "gsm8k-noisy": "GSM8K solutions, noisy", "longtail": "templated, long tails"}
    speed = "modelled_tokens_per_s"
    lines = head("text", "1 sequence", *list(result["traces"]["gsm8k"]["rhyme"])[1:])
    for text, text_name in texts.items():
        rows = result["traces"][text]
        cells = []
        for concurrency, row in rows["rhyme"].items():
            arctic = max(by[concurrency][speed] for name, by in rows.items() if name.startswith("arctic-"))
            cells.append(f"{row[speed] / rows['none'][concurrency][speed]:.2f} ({row[speed] / arctic:.2f})")
        lines.append(row_of(text_name, *cells))
    return with_machine(lines, result)


def variants() -> str:
    """Accepted tokens per verification of drafter variants at 16 rows, all drafting regardless of cost."""
    result = result_of("drafter")
    names = {
        "rhyme fixed": "rhyme",
        "rhyme fixed, the paper's window": "with the paper's rule for draft lengths",
        "rhyme fixed, siblings off": "without siblings",
        "rhyme fixed, common off": "without counts over all prompts",
        "rhyme fixed, rejoin off": "without going on after a difference",
        "oracle": "clairvoyant copies from the history",
    }
    traces = result["traces"]
    lines = head("drafter, policy `fixed`", *(f"`{trace}`" for trace in traces))
    for name, shown in names.items():
        lines.append(row_of(shown, *(f"{rows[name]['16']['accepted_per_verify']:.2f}" for rows in traces.values())))
    return with_machine(lines, result)


def reward_weights() -> str:
    """Accepted tokens per verification with all answers weighted equally, and with rewarded ones twice."""
    result = result_of("reward_weights")
    lines = head("text", "rewarded answers", "equal weights", "rewarded answers twice", "ratio")
    for name, row in result["traces"].items():
        equal, twice = row["equal"], row["rewarded twice"]
        share = f"{row['rewarded']:.0%}"
        lines.append(row_of(f"`{name}`", share, f"{equal:.3f}", f"{twice:.3f}", f"{twice / equal:.3f}"))
    return with_machine(lines, result)
