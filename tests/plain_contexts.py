"""Coder 2 read once more, number by number, as `docs/format.md` says it: slow, and nothing shared with the package."""

import struct
from math import isqrt

STRAIGHT, DIAGONAL = ((1, 0), (-1, 0), (0, 1), (0, -1)), ((1, 1), (1, -1), (-1, 1), (-1, -1))


class Table:
    def __init__(self, rows):
        self.rows = [list(row) for row in rows]

    def frequencies(self, k):
        row = self.rows[k]
        found = [1 + count * (2**14 - len(row)) // sum(row) for count in row]
        found[0] += 2**14 - sum(found)
        return found

    def learn(self, read):
        for k, symbol in read:
            self.rows[k][symbol] += 32


def geometric(k, size):
    rho = isqrt(2**32 + 2 ** (46 - k)) - isqrt(2 ** (46 - k))
    w = [2**32]
    for _ in range(size):
        w.append(w[-1] * rho >> 16)
    both = [w[min(u, size - u)] for u in range(size)]
    return [2**14 * weight // sum(both) for weight in both]


class Lanes:
    def __init__(self, data, count):
        self.states = list(struct.unpack_from(f"<{count}I", data))
        self.words = list(struct.unpack(f"<{(len(data) - 4 * count) // 2}H", data[4 * count :]))

    def block(self, table, classes):
        out, rows = [], {k: table.frequencies(k) for k in set(classes)}
        for i, k in enumerate(classes):
            lane = i % len(self.states)
            x, c, symbol = self.states[lane], 0, 0
            while c + rows[k][symbol] <= x % 2**14:
                c += rows[k][symbol]
                symbol += 1
            x = rows[k][symbol] * (x >> 14) + x % 2**14 - c
            if x < 2**16:
                x = x * 2**16 + self.words.pop(0)
            self.states[lane] = x
            out.append(symbol)
        return out


def order(cells, tokens, row, five):
    """Lists of (token, its neighbours)."""
    if not row:
        return [[(t, []) for t in range(cells * tokens)]]
    kinds = {1: ((), 1), 2: (STRAIGHT, 1)}
    if five:
        kinds = {1: ((), 1), 2: (DIAGONAL, 2), 3: (STRAIGHT, 2), 4: (DIAGONAL, 1), 5: (STRAIGHT, 1)}
    passes = {number: [] for number in kinds}
    for t in range(cells * tokens):
        y, x = divmod(t % tokens, row)
        if not five:
            number = 1 + (x + y) % 2
        elif x % 4 == y % 4 == 0:
            number = 1
        elif x % 4 == y % 4 == 2:
            number = 2
        else:
            number = 5 if (x + y) % 2 else 4 if x % 2 else 3
        offsets, far = kinds[number]
        places = [(y + far * dy, x + far * dx) for dy, dx in offsets]
        inside = [(v, u) for v, u in places if 0 <= v < tokens // row and 0 <= u < row]
        passes[number].append((t, [t - t % tokens + v * row + u for v, u in inside]))
    return list(passes.values())


def decode(data, shape):
    """The symbols of a bank, lists [d][T]."""
    cells, tokens, d = shape
    at = 10

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            at += 1
            value |= (data[at - 1] & 127) << shift
            shift += 7
            if data[at - 1] < 128:
                return value

    def byte():
        nonlocal at
        at += 1
        return data[at - 1]

    bits, n, total = data[1] >> 4, data[1] & 15, cells * tokens
    level, row = byte(), varint()
    switches = [(varint(), byte(), byte()) for _ in range(n)]
    smooth, last = set(), -1
    for _ in range(varint() if row else 0):
        last += 1 + varint()
        smooth.add(last)
    spread = byte()
    if at == len(data):
        return [[level] * total] * d
    size = total * d
    lanes = Lanes(data[at:], 1 if size < 2**17 else min(256, 2 ** ((size // 2048).bit_length() - 1)))
    two, five = (order(cells, tokens, row, which) for which in (False, True))

    modes = [0] * total
    for i in range(n):
        table = Table([[16 * (9 - j), 16 * (1 + j)] for _ in range(2**i) for j in range(9)])
        bit = {}
        for part in five:
            classes = [9 * modes[t] + 4 + sum(2 * bit[o] - 1 for o in near) for t, near in part]
            read = lanes.block(table, classes)
            table.learn(zip(classes, read, strict=True))
            bit |= {t: value for (t, _), value in zip(part, read, strict=True)}
        modes = [mode + 2**i * bit[t] for t, mode in enumerate(modes)]

    table, means = Table([geometric(spread, 32)]), []
    for _ in range(2**n):
        read = lanes.block(table, [0] * d)
        table.learn((0, symbol) for symbol in read)
        means.append([(14 + sum(read[: c + 1])) % 32 for c in range(d)])

    table = Table([geometric(k, 2**bits) for k in range(30)])
    activity, expected, symbols = [128] * total, 128, [None] * d
    for c in sorted(range(d), key=lambda c: (-sum(mean[c] for mean in means), c)):
        levels = [level] * total
        for i, (channel, low, high) in enumerate(switches):
            if channel == c:
                levels = [high if mode >> i & 1 else low for mode in modes]
        if not any(mean[c] for mean in means):
            symbols[c] = levels
            continue
        v, sigma, learnt = {}, {}, []
        for part in five if c in smooth else two:
            classes = {}
            for t, near in part:
                ratio = 256 * (activity[t] + 16 * sum(sigma[o] for o in near)) // (expected + 256 * len(near))
                j = max((j for j in range(-8, 9) if isqrt(isqrt(2 ** (2 * j + 31))) <= ratio), default=-9)
                if means[modes[t]][c]:
                    classes[t] = min(max(means[modes[t]][c] + j, 0), 29)
            read = dict(zip(classes, lanes.block(table, list(classes.values())), strict=True))
            learnt += [(classes[t], u) for t, u in read.items()]
            for t, near in part:
                u, mean = read.get(t, 0), means[modes[t]][c]
                p = (2 * sum(v[o] for o in near) + len(near)) // (2 * len(near)) if c in smooth and near else 0
                v[t] = (u + levels[t] + p) % 2**bits - levels[t]
                sigma[t] = min(256, min(u, 2**bits - u) * isqrt(2 ** (38 - mean)) >> 8) if mean else 16
        table.learn(learnt)
        symbols[c] = [v[t] + levels[t] for t in range(total)]
        activity = [a + 8 * sigma[t] - (a >> 4) for t, a in enumerate(activity)]
        expected += 128 - (expected >> 4)
    if lanes.words or set(lanes.states) != {2**16}:
        raise ValueError("not read to the end")
    return symbols
