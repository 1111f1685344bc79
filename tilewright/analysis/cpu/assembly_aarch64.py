"""AArch64 instructions as the operations that determine control flow, see `assembly`."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

from tilewright.analysis.cpu.instructions import Effect, aarch64_kind

_CONDITIONS = MappingProxyType({
    "eq": "eq", "ne": "ne", "cs": "geu", "hs": "geu", "cc": "ltu", "lo": "ltu", "mi": "neg", "pl": "pos", "hi": "gtu", "ls": "leu",
    "ge": "ge", "lt": "lt", "gt": "gt", "le": "le", "any": "ne", "none": "eq",
})  # fmt: skip
CALLER_SAVED = tuple(f"x{number}" for number in range(19))
_LOADS = re.compile(r"ld(r|p|ur|rsw|psw|rb|rh|rsb|rsh|urb|urh|ursw|1r?|2r?|3r?|4r?|np|ar|axr|ursb|ursh)$")
_STORES = re.compile(r"st(r|p|ur|rb|rh|urb|urh|1|2|3|4|np|lr|lxr)$")
_INVERSE = MappingProxyType({"bic": "and", "orn": "or", "eon": "xor"})
_APPLIED = MappingProxyType({
    "add": "add", "sub": "sub", "adds": "add", "subs": "sub", "mul": "mul", "umulh": "umulh", "smulh": "smulh", "udiv": "udiv", "sdiv": "sdiv",
    "lsl": "shl", "lsr": "shr", "asr": "sar", "and": "and", "ands": "and", "orr": "or", "eor": "xor",
})  # fmt: skip


def _register(text: str) -> tuple[str, int] | None:
    """Canonical name and width of a general-purpose register; the zero register is ("zero", width)."""
    if text in ("sp", "wsp"):
        return "sp", 8
    if text in ("xzr", "wzr"):
        return "zero", 8 if text[0] == "x" else 4
    found = re.match(r"([xw])(\d+)$", text)
    return (f"x{found[2]}", 8 if found[1] == "x" else 4) if found else None


def _number(text: str) -> int | None:
    try:
        return int(text.lstrip("#"), 0)
    except ValueError:
        return None


def _is_vector(text: str) -> bool:
    return bool(re.match(r"\{?\s*[vqdshb]\d+", text))


def decode(mnemonic: str, operands: tuple[str, ...]) -> tuple[list[tuple[Any, ...]], Effect, tuple[Any, ...] | None]:
    """The operations, the effect for counting, and the block's ending if the instruction ends one."""
    if _LOADS.match(mnemonic) or _STORES.match(mnemonic):
        return _memory_access(mnemonic, operands)
    vector = bool(operands) and (_is_vector(operands[0]) or len(operands) > 1 and _is_vector(operands[1]))
    effect = Effect(aarch64_kind(mnemonic, vector))
    if mnemonic == "ret":
        return [], effect, ("return",)
    if mnemonic == "br":
        return [], effect, ("indirect", "")
    if mnemonic == "b":
        return [], effect, ("jump", operands[0])
    conditional = re.match(r"b\.?([a-z]{2,4})$", mnemonic)
    if conditional and conditional[1] in {**_CONDITIONS, "vs": None, "vc": None}:
        return [], effect, ("branch", _CONDITIONS.get(conditional[1]), operands[0])
    if mnemonic in ("cbz", "cbnz"):
        name, width = _register(operands[0]) or ("", 8)
        return [], effect, ("zero", name, width, mnemonic == "cbz", operands[1])
    if mnemonic in ("tbz", "tbnz"):
        name, _ = _register(operands[0]) or ("", 8)
        return [], effect, ("bit", name, _number(operands[1]), mnemonic == "tbz", operands[2])
    if mnemonic in ("bl", "blr"):
        return [("call", operands[0])], effect, None
    if vector:
        return _vector(mnemonic, operands), effect, None
    return _integer(mnemonic, operands), effect, None


def _vector(mnemonic: str, operands: tuple[str, ...]) -> list[tuple[Any, ...]]:
    if mnemonic.startswith(("fcmp", "fccmp")):
        return [("flags", None, 0, 0, 8)]
    target = _register(operands[0])
    found = re.match(r"[vqdshb](\d+)", operands[0])
    if mnemonic == "fmov" and len(operands) == 2 and (target is None) != (_register(operands[1]) is None):
        source = re.match(r"[ds](\d+)$", operands[1])
        if target is not None and source:
            return [("set", *target, (f"v{source[1]}", 0))]
        general = _register(operands[1])
        if found and general is not None:
            return [("vector_words", f"v{found[1]}", ((general[0], 0),))]
    if target is not None:
        return [("forget", target[0])]
    return [("vector_words", f"v{found[1]}", ())] if found else []


def _memory_access(mnemonic: str, operands: tuple[str, ...]) -> tuple[list[tuple[Any, ...]], Effect, None]:
    loads = bool(_LOADS.match(mnemonic))
    at = next(position for position, text in enumerate(operands) if text.startswith("["))
    inside = [part.strip() for part in operands[at].strip("[]! ").split(",")]
    base = (_register(inside[0]) or ("", 8))[0]
    effect = Effect("load" if loads else "store", loads, not loads, base in ("sp", "x29"))
    before: list[tuple[Any, ...]] = []
    after: list[tuple[Any, ...]] = []
    index, scale, displacement = None, 1, 0
    if len(inside) > 1:
        number = _number(inside[1])
        if number is not None:
            displacement = number
        else:
            source, width = _register(inside[1]) or ("", 8)
            index = source
            if len(inside) > 2:
                kind, _, amount = inside[2].partition(" ")
                scale = 1 << (_number(amount) or 0)
                if kind in ("sxtw", "uxtw"):
                    before.append(("extend", "t0", source, 4, 8) if kind == "sxtw" else ("set", "t0", 4, source))
                    index = "t0"
    if operands[at].endswith("!"):
        before.append(("apply", "add", base, 8, base, displacement))
        displacement = 0
    elif len(operands) > at + 1:
        by = _number(operands[at + 1])
        after.append(("apply", "add", base, 8, base, by if by is not None else (_register(operands[at + 1]) or ("", 8))[0]))
    middle: list[tuple[Any, ...]] = []
    for position, text in enumerate(operands[:at]):
        register = _register(text)
        if register is None:
            vector = re.match(r"([qds])(\d+)$", text)
            if vector and vector[1] in "qd":
                size = 16 if vector[1] == "q" else 8
                place = (base, index, scale, displacement + position * size)
                held = (f"v{vector[2]}",)
                middle.append(("vector_load", held, place, size) if loads else ("vector_store", place, held, size))
            continue
        name, width = register
        place = (base, index, scale, displacement + position * width)
        if mnemonic.endswith(("b", "h")):
            middle.append(("forget", name) if loads else ("store", place, 1, name))
        elif mnemonic.endswith("sw"):
            middle.append(("load", name, place, 4, 8))
        else:
            middle.append(("load", name, place, width, 0) if loads else ("store", place, width, name))
    if loads and len(middle) == 2 and middle[0][0] == "load" and middle[0][1] in (base, index):
        middle.reverse()  # the address depends on the first register, so that one is loaded last
    return [*before, *middle, *after], effect, None


def _shifted(operands: tuple[str, ...], width: int) -> tuple[list[tuple[Any, ...]], Any]:
    """The last operand with its shift or extension: preparatory operations, and the value to use."""
    number = _number(operands[0])
    if number is not None:
        shift = operands[1].split() if len(operands) > 1 else []
        return [], number << (_number(shift[1]) or 0) if shift else number
    name, source_width = _register(operands[0]) or ("zero", 8)
    if len(operands) == 1:
        return [], name
    kind, _, amount = operands[1].partition(" ")
    count = _number(amount) or 0 if amount else 0
    if kind in ("lsl", "lsr", "asr"):
        return [("apply", {"lsl": "shl", "lsr": "shr", "asr": "sar"}[kind], "t0", width, name, count)], "t0"
    extended = {"sxtw": ("extend", "t0", name, 4, 8), "uxtw": ("set", "t0", 4, name)}.get(kind)
    before = [extended] if extended else [("apply", "and", "t0", 8, name, {"uxtb": 0xFF, "uxth": 0xFFFF}.get(kind, -1))]
    return [*before, ("apply", "shl", "t0", width, "t0", count)], "t0"


def _integer(mnemonic: str, operands: tuple[str, ...]) -> list[tuple[Any, ...]]:
    if mnemonic in ("nop", "prfm", "dmb", "hint", "bti", "paciasp", "autiasp"):
        return []
    name, width = _register(operands[0]) or ("none", 8)
    if mnemonic in ("cmp", "cmn", "tst", "cmpw"):
        before, value = _shifted(operands[1:], width)
        if mnemonic == "cmn":
            return [*before, ("apply", "sub", "t1", width, 0, value), ("flags", "sub", name, "t1", width)]
        return [*before, ("flags", "sub" if mnemonic == "cmp" else "and", name, value, width)]
    if mnemonic in ("ccmp", "ccmn"):
        value = _number(operands[1])
        value = value if value is not None else (_register(operands[1]) or ("zero", 8))[0]
        if mnemonic == "ccmn":
            return [("flags", None, 0, 0, 8)]
        return [("compare_if", _CONDITIONS.get(operands[3]), name, value, width, _number(operands[2]))]
    if mnemonic in ("mov", "movz"):
        before, value = _shifted(operands[1:], width)
        return [*before, ("set", name, width, value)]
    if mnemonic in ("movn", "mvn"):
        before, value = _shifted(operands[1:], width)
        return [*before, ("apply", "sub", name, width, -1, value)]
    if mnemonic == "movk":
        shift = _number(operands[2].split()[1]) or 0 if len(operands) > 2 else 0
        others = ((1 << 64) - 1) ^ (0xFFFF << shift)
        return [("apply", "and", name, width, name, others), ("apply", "or", name, width, name, (_number(operands[1]) or 0) << shift)]
    if mnemonic == "adrp":
        return [("set", name, 8, int(operands[1], 16))]
    if mnemonic in ("neg", "negs"):
        before, value = _shifted(operands[1:], width)
        return [*before, ("apply", "sub", name, width, 0, value), *([("flags", "result", name, 0, width)] if mnemonic == "negs" else [])]
    if mnemonic in ("madd", "msub", "mneg", "smaddl", "umaddl", "smull", "umull"):
        return _product(mnemonic, operands, name, width)
    if mnemonic in ("sxtw", "sxth", "sxtb", "uxtw", "uxth", "uxtb"):
        source = (_register(operands[1]) or ("zero", 4))[0]
        size = {"w": 4, "h": 2, "b": 1}[mnemonic[-1]]
        return [("extend", name, source, size, width) if mnemonic[0] == "s" else ("apply", "and", name, 8, source, (1 << 8 * size) - 1)]
    if mnemonic in ("sbfiz", "ubfiz", "ubfx", "sbfx"):
        source = (_register(operands[1]) or ("zero", 8))[0]
        low, count = _number(operands[2]) or 0, _number(operands[3]) or 0
        if mnemonic.endswith("fx"):
            field: list[tuple[Any, ...]] = [("apply", "shr", "t0", 8, source, low), ("apply", "and", "t0", 8, "t0", (1 << count) - 1)]
            if mnemonic[0] == "s":
                field += [("apply", "shl", "t0", 8, "t0", 64 - count), ("apply", "sar", "t0", 8, "t0", 64 - count)]
            return [*field, ("set", name, width, "t0")]
        if mnemonic[0] == "s" and count == 32:
            return [("extend", "t0", source, 4, 8), ("apply", "shl", name, width, "t0", low)]
        keep = [("apply", "shl", "t0", 8, source, 64 - count), ("apply", "sar" if mnemonic[0] == "s" else "shr", "t0", 8, "t0", 64 - count)]
        return [*keep, ("apply", "shl", name, width, "t0", low)]
    if mnemonic in ("csel", "csinc", "csinv", "csneg", "cset", "csetm", "cinc", "cinv", "cneg"):
        return _choice(mnemonic, operands, name, width)
    inverse = _INVERSE.get(mnemonic)
    if mnemonic in _APPLIED or inverse:
        first = (_register(operands[1]) or ("zero", 8))[0]
        before, value = _shifted(operands[2:], width)
        if inverse:
            return [*before, ("apply", "sub", "t1", width, -1, value), ("apply", inverse, name, width, first, "t1")]
        made: list[tuple[Any, ...]] = [("apply", _APPLIED[mnemonic], name, width, first, value)]
        if mnemonic == "subs":
            made.insert(0, ("flags", "sub", first, value, width))
        elif mnemonic in ("adds", "ands"):
            made.append(("flags", "result" if mnemonic == "adds" else "and", name, name, width))
        return [*before, *made]
    return [("forget", name), ("flags", None, 0, 0, 8)]


def _product(mnemonic: str, operands: tuple[str, ...], name: str, width: int) -> list[tuple[Any, ...]]:
    registers = [(_register(text) or ("zero", 8))[0] for text in operands[1:]]
    before: list[tuple[Any, ...]] = []
    if mnemonic.endswith("l"):
        extend = [("extend", t, r, 4, 8) if mnemonic[0] == "s" else ("set", t, 4, r) for t, r in zip(("t0", "t1"), registers, strict=False)]
        before, registers, width = list(extend), ["t0", "t1", *registers[2:]], 8
    before.append(("apply", "mul", "t0", width, registers[0], registers[1]))
    if len(registers) == 2:
        return [*before, ("apply", "sub", name, width, 0, "t0") if mnemonic == "mneg" else ("set", name, width, "t0")]
    return [*before, ("apply", "sub" if mnemonic == "msub" else "add", name, width, registers[2], "t0")]


def _choice(mnemonic: str, operands: tuple[str, ...], name: str, width: int) -> list[tuple[Any, ...]]:
    condition = _CONDITIONS.get(operands[-1])
    if mnemonic in ("cset", "csetm"):
        return [("choose", name, width, condition, 1 if mnemonic == "cset" else -1, 0)]
    first = (_register(operands[1]) or ("zero", 8))[0]
    changes = {"inc": ("add", 1), "inv": ("sub", -1), "neg": ("sub", 0)}
    change = changes.get(mnemonic[-3:])
    if len(operands) == 3:  # cinc, cinv, cneg: of one register, where the condition holds
        assert change is not None
        return [_changed(*change, first, width), ("choose", name, width, condition, "t0", first)]
    second = (_register(operands[2]) or ("zero", 8))[0]
    if change is None:
        return [("choose", name, width, condition, first, second)]
    return [_changed(*change, second, width), ("choose", name, width, condition, first, "t0")]


def _changed(operator: str, number: int, register: str, width: int) -> tuple[Any, ...]:
    """t0 = number + register, or number - register."""
    return ("apply", operator, "t0", width, number, register)
