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
            peers = (by for name, by in rows.items() if name.startswith("arctic") and concurrency in by)
            arctic = max(by[concurrency][speed] for by in peers)
            cells.append(f"{row[speed] / rows['none'][concurrency][speed]:.2f} ({row[speed] / arctic:.2f})")
        lines.append(row_of(text_name, *cells))
    return with_machine(lines, result)


def models() -> str:
    """Tokens per second of replayed rhyme relative to no drafts, and to tuned suffix decoding, by model and rows."""
    result = result_of("drafter")
    speed = "modelled_tokens_per_s"
    rows = list(next(iter(next(iter(result["models"].values())).values()))["rhyme"])
    lines = head("model", "text", *(f"{running} sequences" for running in rows))
    for model, texts in result["models"].items():
        for text, by_name in texts.items():
            ratios = (
                [by_name["rhyme"][running][speed] / by_name[peer][running][speed] for peer in ("none", "arctic tuned")]
                for running in rows
            )
            lines.append(row_of(model, f"`{text}`", *(f"{none:.2f} ({arctic:.2f})" for none, arctic in ratios)))
    return with_machine(lines, result)


def suffix_tuned() -> str:
    """The fastest settings of suffix decoding that the search found, and their tokens per second / the defaults'."""
    result = result_of("drafter")
    lines = head("text", "sequences", "draft length", "factor", "least probability", "depth", "speed / defaults")
    for text, rows in result["traces"].items():
        for running, row in rows["arctic tuned"].items():
            gain = row["modelled_tokens_per_s"] / rows["arctic-24"][running]["modelled_tokens_per_s"]
            lines.append(row_of(f"`{text}`", running, *map(str, row["settings"].values()), f"{gain:.2f}"))
    return with_machine(lines, result)


def variants() -> str:
    """Accepted tokens per verification of drafter variants at 16 rows, all drafting regardless of cost."""
    result = result_of("drafter")
    names = {
        "rhyme fixed": "rhyme",
        "rhyme fixed, the paper's window": "with the paper's rule for draft lengths",
        "rhyme fixed, no history": "without the prompt's history",
        "rhyme fixed, siblings only": "without history and counts over all prompts",
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
