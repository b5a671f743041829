"""Prompt lookup and its rounds once more, in plain Python: nothing is shared with the package."""

import numpy as np


def followed(source, text, longest=3, texts=()):
    """What followed the longest match of the last tokens, and how long that is."""
    inside, stored = followed_inside(source, text, longest), continued(texts, text, longest)
    return stored if stored[1] and stored[1] >= inside[1] else inside


def continued(texts, text, longest=3, reach=12, share=0.1):
    """What follows the last tokens best in stored texts, and how many of them are found there."""
    for size in range(min(longest, len(text)), 0, -1):
        last = list(text[-size:])
        rests = [
            stored[at + size :]
            for stored in texts
            for at in range(len(stored) - size)
            if list(stored[at : at + size]) == last
        ]
        if rests:
            agreeing = [
                [sum(other[: n + 1] == rest[: n + 1] for other in rests) for n in range(len(rest[:reach]))]
                for rest in rests
            ]
            best = max(range(len(rests)), key=lambda n: sum(agreeing[n]))  # the first of equals
            kept = sum(count >= share * len(rests) for count in agreeing[best])
            return list(rests[best][:kept]), size
    return [], 0


def followed_inside(source, text, longest=3):
    """followed() without stored texts."""
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


def common(prefix, other, longest):
    count = 0
    while count < min(longest, len(prefix), len(other)) and prefix[-1 - count] == other[-1 - count]:
        count += 1
    return count


def drafted(source, text, limit, eos, texts=()):
    tokens = followed(source, text, texts=texts)[0][:limit]
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def greedy_rounds(source, prompt, text, block_size, eos, texts=()):
    """The counts of greedy rounds that write `text`: rounds, drafted and accepted tokens."""
    rounds = proposed = accepted = at = 0
    while at < len(text):
        draft = drafted(source, [*prompt, *text[:at]], block_size, eos, texts)
        same = 0
        while same < len(draft) and at + same < len(text) and draft[same] == text[at + same]:
            same += 1
        rounds, proposed, accepted = rounds + 1, proposed + len(draft), accepted + same
        at += same + 1
    return rounds, proposed, accepted


def token_v3_law(law_after, source, prompt, block_size, alpha, steps, eos, stored=()):
    """Every text of `steps` tokens -> its probability, by token_v3 on these drafts: a drafted token stands
    where p(x) >= (1 - alpha) max p; else, and after the last one, comes a sample of p."""
    texts = {}

    def write(text, mass, draft):
        if len(text) == steps or (text and text[-1] == eos):
            texts[text] = texts.get(text, 0.0) + mass
            return
        p = law_after([*prompt, *text])
        if draft is None:
            draft = drafted(source, [*prompt, *text], block_size, eos, stored)
        if draft and p[draft[0]] >= (1 - alpha) * p.max():
            write((*text, draft[0]), mass, draft[1:])
            return
        for token, chance in enumerate(np.asarray(p)):
            stands = bool(draft) and token == draft[0]  # drawn from p, but it is the draft: the round goes on
            write((*text, token), mass * chance, draft[1:] if stands else None)

    write((), 1.0, None)
    return texts


def chooses(lookup, match, limit, seen):
    """Whether a round is looked up, where `limit` tokens would be drafted otherwise."""
    tested, kept, found_tested, found_kept = seen
    acceptance = (kept + 8 * 0.8) / (tested + 8)
    looked_up = (found_kept + 8 * LOOKED_UP) / (found_tested + 8)
    yields = [
        sum(a**n for n in range(count + 1)) for a, count in ((looked_up, len(lookup)), (acceptance, limit))
    ]
    return bool(lookup) and match >= 2 and yields[0] >= yields[1] - 1e-9


LOOKED_UP = 0.93
"""Of the tests: more than the package's, so that a short text has rounds of both kinds."""


def seen_after(seen, lookup, match, written, looked_up, drafted, accepted):
    """What a row knows after a round that has `written` these tokens."""
    known = min(len(lookup), len(written)) if match >= 2 else 0
    same = next((n for n in range(known) if lookup[n] != written[n]), known)
    drafter_counts = (0, 0) if looked_up else (accepted + (accepted < drafted), accepted)
    return tuple(a + b for a, b in zip(seen, (*drafter_counts, same + (same < known), same), strict=True))


def greedy_choices(source, prompt, text, size, eos, likeliest, texts=()):
    """The counts of greedy rounds that write `text` with a lookup beside a drafter, whose next token is
    likeliest(text): rounds, drafted and accepted tokens, rounds that are looked up."""
    seen, at, counts = (0, 0, 0, 0), 0, [0, 0, 0, 0]
    while at < len(text):
        before = [*prompt, *text[:at]]
        lookup, match = drafted(source, before, size, eos, texts), followed(source, before, texts=texts)[1]
        looked_up = chooses(lookup, match, size, seen)
        draft = list(lookup)
        if not looked_up:
            draft = []
            while len(draft) < size:
                draft.append(likeliest([*before, *draft]))
        same = 0
        while same < len(draft) and at + same < len(text) and draft[same] == text[at + same]:
            same += 1
        written = text[at : at + same + 1]
        accepted = min(same, len(written))
        seen = seen_after(seen, lookup, match, written, looked_up, len(draft), accepted)
        for n, count in enumerate((1, len(draft), accepted, looked_up)):
            counts[n] += count
        at += len(written)
    return tuple(counts)


def choice_law(q_after, p_after, rule, source, prompt, size, steps, eos):
    """Every text of `steps` tokens -> its probability, with a lookup beside a drafter: rule(q~, p) is the
    target where a token is drafted from q~. After the last draft q~ is the drafter's."""
    texts = {}

    def write(text, mass, seen, state):
        if len(text) == steps or (text and text[-1] == eos):
            texts[text] = texts.get(text, 0.0) + mass
            return
        before = [*prompt, *text]
        if state is None:
            lookup, match = drafted(source, before, size, eos), followed(source, before)[1]
            limit = size
            state = lookup, match, chooses(lookup, match, limit, seen), len(text)
        lookup, match, looked_up, begin = state
        place, count = len(text) - begin, len(lookup) if looked_up else size
        q = q_after(before)
        q = np.eye(len(q))[lookup[place]] if looked_up and place < count else q
        pi = rule(q, p_after(before))
        for token in range(len(q)):
            stands = min(q[token], pi[token]) if place < count else 0.0
            if stands > 0:
                write((*text, token), mass * stands, seen, state)
            if pi[token] - stands > 1e-12:
                written = (*text[begin:], token)
                after = seen_after(seen, lookup, match, written, looked_up, count, place)
                write((*text, token), mass * (pi[token] - stands), after, None)

    write((), 1.0, (0, 0, 0, 0), None)
    return texts
