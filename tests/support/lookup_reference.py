"""Prompt lookup and its rounds once more, in plain Python: nothing is shared with the package."""

import numpy as np


def followed(source, text, longest=3):
    """What followed the longest match of the last tokens, and how long that is."""
    best, after = 0, []
    for place in range(len(source) - 1):  # the first of equals
        if (match := common(source[: place + 1], text, longest)) > best:
            best, after = match, source[place + 1 :]
    in_text = 0
    for place in range(len(text) - 1):  # the last of equals
        match = common(text[: place + 1], text, longest)
        if match and match >= max(in_text, best + 1 if not in_text else 0):
            in_text, after = match, text[place + 1 :]
    return list(after), max(best, in_text)


def common(one, other, longest):
    count = 0
    while count < min(longest, len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count


def drafted(source, text, limit, eos):
    tokens = followed(source, text)[0][:limit]
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def greedy_rounds(source, prompt, text, block_size, eos):
    """The counts of greedy rounds that write `text`: rounds, drafted and accepted tokens."""
    rounds = proposed = accepted = at = 0
    while at < len(text):
        draft = drafted(source, [*prompt, *text[:at]], block_size, eos)
        same = 0
        while same < len(draft) and at + same < len(text) and draft[same] == text[at + same]:
            same += 1
        rounds, proposed, accepted = rounds + 1, proposed + len(draft), accepted + same
        at += same + 1
    return rounds, proposed, accepted


def token_v3_law(law_after, source, prompt, block_size, alpha, steps, eos):
    """Every text of `steps` tokens -> its probability, by token_v3 on these drafts: a drafted token stands
    where p(x) >= (1 - alpha) max p; else, and after the last one, comes a sample of p."""
    texts = {}

    def write(text, mass, draft):
        if len(text) == steps or (text and text[-1] == eos):
            texts[text] = texts.get(text, 0.0) + mass
            return
        p = law_after([*prompt, *text])
        if draft is None:
            draft = drafted(source, [*prompt, *text], block_size, eos)
        if draft and p[draft[0]] >= (1 - alpha) * p.max():
            write((*text, draft[0]), mass, draft[1:])
            return
        for token, chance in enumerate(np.asarray(p)):
            stands = bool(draft) and token == draft[0]  # drawn from p, but it is the draft: the round goes on
            write((*text, token), mass * chance, draft[1:] if stands else None)

    write((), 1.0, None)
    return texts
