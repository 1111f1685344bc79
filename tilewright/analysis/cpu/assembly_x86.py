"""x86-64 instructions (AT&T syntax) as the operations that determine control flow, see `assembly`."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

from tilewright.analysis.cpu.instructions import Effect, x86_kind

_SIZES = MappingProxyType({"q": 8, "l": 4, "w": 2, "b": 1})
_CONDITIONS = MappingProxyType({
    "e": "eq", "z": "eq", "ne": "ne", "nz": "ne", "b": "ltu", "c": "ltu", "nae": "ltu", "ae": "geu", "nb": "geu", "nc": "geu", "be": "leu",
    "na": "leu", "a": "gtu", "nbe": "gtu", "l": "lt", "nge": "lt", "ge": "ge", "nl": "ge", "le": "le", "ng": "le", "g": "gt", "nle": "gt",
    "s": "neg", "ns": "pos",
})  # fmt: skip


def _registers() -> dict[str, tuple[str, int]]:
    names: dict[str, tuple[str, int]] = {}
    for letter in "abcd":
        names |= {f"r{letter}x": (f"r{letter}x", 8), f"e{letter}x": (f"r{letter}x", 4), f"{letter}x": (f"r{letter}x", 2)}
        names |= {f"{letter}l": (f"r{letter}x", 1), f"{letter}h": ("", 1)}
    for name in ("si", "di", "bp", "sp"):
        names |= {f"r{name}": (f"r{name}", 8), f"e{name}": (f"r{name}", 4), name: (f"r{name}", 2), f"{name}l": (f"r{name}", 1)}
    for number in range(8, 16):
        names |= {f"r{number}{suffix}": (f"r{number}", size) for suffix, size in (("", 8), ("d", 4), ("w", 2), ("b", 1))}
    return names


REGISTERS = MappingProxyType(_registers())
_BINARY = MappingProxyType({name: "shl" if name == "sal" else name for name in ("add", "sub", "and", "or", "xor", "sal", "shl", "shr", "sar")})
_MEMORY = re.compile(r"^([^()]*)\(([^()]*)\)$")
_VECTOR_MOVES = tuple(f"vmov{kind}" for kind in ("ups", "aps", "upd", "apd", "dqu", "dqa", "dqu8", "dqu16", "dqu32", "dqu64", "dqa32", "dqa64"))
CALLER_SAVED = ("rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11")


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def _memory(text: str) -> tuple[Any, ...] | None:
    """The parsed address, or None if the operand is not one."""
    text = text.split(":")[-1]
    if text.startswith(("%", "$")):
        return None
    found = _MEMORY.match(text)
    if not found:
        number = _number(text)
        return (("symbol", text), None, 1, 0) if number is None else (None, None, 1, number)
    parts = [part.strip().lstrip("%") for part in found[2].split(",")]
    base, index = parts[0], parts[1] if len(parts) > 1 else ""
    if base == "rip":
        return (("symbol", found[1]), None, 1, 0)
    displacement = _number(found[1] or "0")
    if displacement is None:
        return (("symbol", found[1]), None, 1, 0)
    registers = [REGISTERS[name][0] if name in REGISTERS else None for name in (base, index)]
    return (*registers, int(parts[2]) if len(parts) > 2 else 1, displacement)


def _vector(text: str) -> str | None:
    found = re.match(r"%[xyz]mm(\d+)", text)
    return f"v{found[1]}" if found else None


def _bytes(text: str) -> int:
    return {"x": 16, "y": 32, "z": 64}[text[1]]


def decode(mnemonic: str, operands: tuple[str, ...]) -> tuple[list[tuple[Any, ...]], Effect, tuple[Any, ...] | None]:
    """The operations, the effect for counting, and the block's ending if the instruction ends one."""
    effect = _effect(mnemonic, operands)
    if mnemonic in ("ret", "rep ret", "repz ret"):
        return [], effect, ("return",)
    if mnemonic == "jmp":
        return [], effect, ("jump", operands[0]) if not operands[0].startswith("*") else ("indirect", "")
    if mnemonic[0] == "j":
        return [], effect, ("branch", _CONDITIONS.get(mnemonic[1:]), operands[0])
    if mnemonic == "call":
        return [("call", operands[0])], effect, None
    if mnemonic[0] in "vk":
        return _decode_vector(mnemonic, operands), effect, None
    return _decode_integer(mnemonic, operands), effect, None


def _effect(mnemonic: str, operands: tuple[str, ...]) -> Effect:
    kind = x86_kind(mnemonic)
    where = [position for position, text in enumerate(operands) if _memory(text.partition("{")[0]) is not None]
    stack = any(re.search(r"\(%r[sb]p", operands[position]) for position in where)
    if mnemonic.startswith(("push", "pop")):
        return Effect("store" if mnemonic.startswith("push") else "load", mnemonic.startswith("pop"), mnemonic.startswith("push"), True)
    if mnemonic.startswith("rep "):
        return Effect("store", False, True)
    if not where or kind == "branch" or mnemonic.startswith(("lea", "nop", "prefetch")):
        return Effect(kind)
    last = where[-1] == len(operands) - 1
    compares = mnemonic.startswith(("cmp", "test", "vucomis", "vcomis", "bt"))
    moves = kind == "move"
    if last and not compares:
        single = len(operands) == 1 and mnemonic.startswith(("mul", "imul", "div", "idiv"))
        if single:
            return Effect(kind, True, False, stack)
        return Effect("store", False, True, stack) if moves or mnemonic.startswith("set") else Effect(kind, True, True, stack)
    pure = moves and not mnemonic.startswith(("vperm", "vshuf", "vunpck", "vinsert", "vpinsr", "vblend", "vpblend", "vpshuf"))
    return Effect("load" if pure or mnemonic.startswith("movz") or mnemonic.startswith("movs") else kind, True, False, stack)


def _decode_vector(mnemonic: str, operands: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Operations of vector instructions: relevant only if they copy pointers, or write a general-purpose register or the flags."""
    if not operands or mnemonic.startswith(("vzero",)):
        return []
    target = operands[-1].partition("{")[0]
    if mnemonic.startswith(("vucomis", "vcomis", "vptest", "vtest", "kortest", "ktest")):
        return [("flags", None, 0, 0, 8)]
    first, register = operands[0], _vector(target)
    general = REGISTERS.get(target[1:]), REGISTERS.get(first[1:])
    if general[0] is not None:
        if mnemonic in ("vmovq", "vmovd") and _vector(first) is not None:
            return [("set", general[0][0], general[0][1], (_vector(first), 0))]
        if mnemonic == "vpextrq":
            return [("set", general[0][0], 8, (_vector(operands[1]), int(first == "$1" or first == "$0x1")))]
        if mnemonic in ("kmovq", "kmovd") and first.startswith("%k"):
            return [("set", general[0][0], general[0][1], first[1:])]
        return [("forget", general[0][0])]
    if target.startswith("%k"):
        return [("set", target[1:], general[1][1], general[1][0]) if general[1] is not None else ("forget", target[1:])]
    if mnemonic in _VECTOR_MOVES and len(operands) == 2 and "{" not in operands[1]:
        if register is None:
            address = _memory(target)
            return [("vector_store", address, (_vector(first),), _bytes(first))]
        address = _memory(first)
        if address is not None:
            return [("vector_load", (register,), address, _bytes(target))]
        return [("vector_words", register, ((_vector(first), None),))]
    if mnemonic == "vmovq" and register is None:
        return [("vector_store", _memory(target), (_vector(first),), 8)]
    if mnemonic in ("vmovq", "vmovd") and general[1] is not None:
        return [("vector_words", register, ((general[1][0], 0),))]
    if mnemonic == "vmovq" and _memory(first) is not None:
        return [("vector_load", (register,), _memory(first), 8)]
    if mnemonic == "vpinsrq" and register is not None and operands[0] in ("$1", "$0x1"):
        source = operands[1]
        if source[1:] in REGISTERS:
            return [("vector_words", register, ((_vector(operands[2]), 0), (REGISTERS[source[1:]][0], 0)))]
        return [("load", "t0", _memory(source), 8, 0), ("vector_words", register, ((_vector(operands[2]), 0), ("t0", 0)))]
    if mnemonic in ("vmovddup", "vpbroadcastq") and register is not None and _memory(first) is not None:
        return [("load", "t0", _memory(first), 8, 0), ("vector_words", register, (("t0", 0),) * (_bytes(target) // 8))]
    if mnemonic == "vpunpcklqdq" and register is not None and _vector(operands[0]) is not None:
        return [("vector_words", register, ((_vector(operands[1]), 0), (_vector(operands[0]), 0)))]
    if mnemonic.startswith("vinserti128") or mnemonic.startswith("vinsertf128"):
        low, high = _vector(operands[2]), _vector(operands[1])
        if operands[0] in ("$1", "$0x1") and high is not None:
            return [("vector_words", register, ((low, 0), (low, 1), (high, 0), (high, 1)))]
    if register is not None:
        return [("vector_words", register, ())]
    return []


def _source(text: str, size: int) -> tuple[list[tuple[Any, ...]], Any]:
    """Preparatory operations, and the operand as a constant or register."""
    if text.startswith("$"):
        number = _number(text[1:])
        return ([], number) if number is not None else ([("address", "t0", (("symbol", text[1:]), None, 1, 0))], "t0")
    if text.startswith("%"):
        return [], REGISTERS[text[1:]][0] or "none"
    return [("load", "t0", _memory(text), size, 0)], "t0"


def _width(mnemonic: str, operands: tuple[str, ...], suffixed: str) -> int:
    for text in reversed(operands):
        if text[1:] in REGISTERS and text[0] == "%":
            return REGISTERS[text[1:]][1]
    return _SIZES.get(mnemonic[len(suffixed) :], 8)


def _decode_integer(mnemonic: str, operands: tuple[str, ...]) -> list[tuple[Any, ...]]:
    if mnemonic.startswith(("nop", "prefetch", "endbr", "ud2", "xchg")) or not operands and mnemonic not in ("leave", "cltq", "cqto", "cltd"):
        return []
    if mnemonic == "rep stos":
        return [("apply", "mul", "t0", 8, "rcx", REGISTERS[operands[0][1:]][1]), ("apply", "add", "rdi", 8, "rdi", "t0"), ("set", "rcx", 8, 0)]
    if mnemonic == "leave":
        return [("set", "rsp", 8, "rbp"), ("load", "rbp", ("rsp", None, 1, 0), 8, 0), ("apply", "add", "rsp", 8, "rsp", 8)]
    if mnemonic in ("cltq", "cqto", "cltd"):
        return [("extend", "rax", "rax", 4, 8)] if mnemonic == "cltq" else [("apply", "sign", "rdx", 8 if mnemonic == "cqto" else 4, "rax", 0)]
    if mnemonic.startswith("push"):
        before, value = _source(operands[0], 8)
        return [*before, ("apply", "sub", "rsp", 8, "rsp", 8), ("store", ("rsp", None, 1, 0), 8, value)]
    if mnemonic.startswith("pop"):
        return [("load", REGISTERS[operands[0][1:]][0], ("rsp", None, 1, 0), 8, 0), ("apply", "add", "rsp", 8, "rsp", 8)]
    target = operands[-1]
    register = REGISTERS[target[1:]][0] if target.startswith("%") and target[1:] in REGISTERS else None
    wide = re.match(r"mov([sz])([bwl])([wlq])$", mnemonic)
    if wide and register:
        size, to = _SIZES[wide[2]], _SIZES[wide[3]]
        before, value = _source(operands[0], size)
        return [*before, ("extend", register, value, size, to) if wide[1] == "s" else ("apply", "and", register, 8, value, (1 << 8 * size) - 1)]
    if mnemonic.startswith("mov"):
        width = _width(mnemonic, operands, "mov")
        if register is None:
            before, value = _source(operands[0], width)
            return [*before, ("store", _memory(target), width, value)]
        address = None if operands[0][0] in "$%" else _memory(operands[0])
        if address is not None:
            return [("load", register, address, width, 0)] if width >= 4 else [("forget", register)]
        before, value = _source(operands[0], width)
        return [*before, ("set", register, width, value) if width >= 4 else ("forget", register)]
    if mnemonic.startswith("lea") and mnemonic != "leave":
        return [("address", register, _memory(operands[0])), *([("set", register, 4, register)] if REGISTERS[target[1:]][1] == 4 else [])]
    if mnemonic.startswith(("cmp", "test")):
        kind = "sub" if mnemonic.startswith("cmp") else "and"
        width = _width(mnemonic, operands, "cmp" if kind == "sub" else "test")
        first, a = _source(target, width)
        second, b = _source(operands[0], width)
        return [*first, *second, ("flags", kind, a, b, width)]
    condition = re.match(r"(set|cmov)([a-z]+?)$", mnemonic)
    if condition and register:
        name = _CONDITIONS.get(condition[2]) or _CONDITIONS.get(condition[2].rstrip("lq"))
        if condition[1] == "set":
            return [("choose", register, 8, name, 1, 0)]
        width = _width(mnemonic, operands, "cmov")
        before, value = _source(operands[0], width)
        return [*before, ("choose", register, width, name, value, register)]
    return _arithmetic(mnemonic, operands, register, target)


def _arithmetic(mnemonic: str, operands: tuple[str, ...], register: str | None, target: str) -> list[tuple[Any, ...]]:
    shift = re.match(r"(shl|shr|sar)x", mnemonic)
    if shift and register:
        before, value = _source(operands[1], 8)
        return [*before, ("apply", shift[1], register, _width(mnemonic, operands, shift[0]), value, _source(operands[0], 8)[1])]
    if mnemonic.startswith("imul") and len(operands) > 1:
        width = _width(mnemonic, operands, "imul")
        before, value = _source(operands[-2], width)
        factor = _source(operands[0], width)[1] if len(operands) == 3 else register
        return [*before, ("apply", "mul", register, width, value, factor), ("flags", None, 0, 0, 8)]
    wide = re.match(r"(i?mul|i?div)[ql]?$", mnemonic)
    if len(operands) == 1 and wide:
        width = _width(mnemonic, operands, wide[1])
        before, value = _source(target, width)
        return [*before, ("wide", wide[1], width, value), ("flags", None, 0, 0, 8)]
    if re.match(r"sbb[qlw]?$", mnemonic) and register and operands[0] == target:  # all ones if the carry is set
        return [("choose", register, _width(mnemonic, operands, "sbb"), _CONDITIONS["b"], -1, 0), ("flags", None, 0, 0, 8)]
    found = re.match(r"(add|sub|and|or|xor|sal|shl|shr|sar|neg|not|inc|dec)([qlwb])?$", mnemonic)
    if not found:
        return [*([("forget", register)] if register else []), ("flags", None, 0, 0, 8)]
    name, width = found[1], _width(mnemonic, operands, found[1])
    before, place = [], register
    if register is None:
        before, place = [("load", "t1", _memory(target), width, 0)], "t1"
    if name == "xor" and len(operands) == 2 and operands[0] == operands[1]:
        return [("set", place, 8, 0), ("flags", "and", 0, 0, width)]
    if name in ("neg", "not"):
        made: list[tuple[Any, ...]] = [("apply", "sub", place, width, 0 if name == "neg" else -1, place)]
        flags: list[tuple[Any, ...]] = [("flags", "result", place, 0, width)] if name == "neg" else []
    else:
        if name in ("inc", "dec"):
            name, value = ("add" if name == "inc" else "sub"), 1
        elif len(operands) == 1:
            value = 1
        else:
            more, value = _source(operands[0], width)
            before = [*before, *more]
        if name == "sub":
            before.append(("flags", "sub", place, value, width))
        made = [("apply", _BINARY[name], place, width, place, value)] if width >= 4 else [("forget", place)]
        flags = [] if name == "sub" else [("flags", "and" if name in ("and", "or", "xor") else "result", place, place, width)]
    after = [("store", _memory(target), width, place)] if register is None else []
    return [*before, *made, *flags, *after]
