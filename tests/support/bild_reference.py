"""BiLD a token at a time, in numpy: the text that it writes, and how often the verifier reads."""

import numpy as np


def softmax(row):
    row = np.exp(row.astype(np.float64) - row.max())
    return row / row.sum()


def bild(tables, prompt, fallback, threshold, window, limit, eos, compat):
    """BiLD, a token at a time (`compat`: as it was released): the text, and how often the verifier read."""

    def law(which, ids):
        padded = (0, *ids)
        return softmax(tables[which][padded[-2], padded[-1]])

    ids, fixed, calls, ended = list(prompt), len(prompt), 0, False

    def finished():
        return len(ids) - len(prompt) >= limit or (len(ids) > len(prompt) and ids[-1] == eos)

    def large():
        nonlocal ids, fixed, calls
        calls += 1
        for k in range(fixed, len(ids)):
            p = law(1, ids[:k])
            if -np.log(p[ids[k]]) > threshold:
                if p.argmax() != ids[k]:
                    ids = [*ids[:k], int(p.argmax())]
                    fixed = len(ids)
                    return True
                if compat:
                    break
        if not finished():
            ids.append(int(law(1, ids).argmax()))
        fixed = len(ids)
        return False

    large()
    while not ended:
        if finished():
            if fixed == len(ids) or compat:
                break
            large()
            continue
        q = law(0, ids)
        if len(ids) - fixed < window and q.max() >= fallback:
            ids.append(int(q.argmax()))
        elif large() and compat and len(ids) - len(prompt) < limit:
            ids.append(int(law(1, ids).argmax()))
            fixed, calls = len(ids), calls + 1
    return ids[len(prompt) :], calls
