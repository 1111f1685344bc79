"""Operands and kinds of instructions for the pipeline model: the registers and flags that each reads and writes, and its rows of
`hardware/pipelines.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.analysis.cpu.assembly_x86 import REGISTERS

FLAGS = "flags"


@dataclass(frozen=True)
class Usage:
    """One instruction. `load`, `compute` and `store` are (kind, vector bits), executed in this order; any may be None. The load waits only for
    `address`; the computation waits for the load and `sources`, and for `accumulator` as a multiply-add does for its addend; `targets` are ready
    after it. `updated`: an address register that the access itself advances. `decides`: the instruction only sets flags, or changes one register and
    sets flags, so that it may be fused with a following branch. `count`: the number of vector registers loaded or stored."""

    load: tuple[str, int] | None = None
    compute: tuple[str, int] | None = None
    store: tuple[str, int] | None = None
    address: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    accumulator: str = ""
    targets: tuple[str, ...] = ()
    updated: str = ""
    decides: bool = False
    is_jump: bool = False
    count: int = 1


_X86_KINDS = (
    (r"vfn?m(add|sub)(add|sub)?\d", "fma"),
    (r"vmul[ps][sd]", "multiply"),
    (r"v(add|sub|scalef)[ps][sd]|vh(add|sub)p", "add"),
    (r"v(and|andn|or|xor)p[sd]|vp(and|andn|or|xor)[dq]?$|vpternlog", "logic"),
    (r"vpmull|vpmulu?dq", "vector multiply"),
    (r"vps(ll|rl|ra)[wdqv]", "vector shift"),
    (r"vcmp|vpcmp", "compare"),
    (r"v(max|min)[ps][sd]|vp(max|min)[su]", "maximum"),
    (r"vround|vrndscale", "round"),
    (r"vcvt", "convert"),
    (r"vdiv", "divide"),
    (r"vsqrt", "square root"),
    (r"vu?comis", "compare flags"),
    (r"vp?blendv", "blend variable"),
    (r"vp?blendm", "blend mask"),
    (r"vp?blend", "blend"),
    (r"vp?insert[fi]|vp?extract[fi]|vperm|vp?broadcast|valign", "permute"),
    (r"vgather|vpgather|vscatter", "gather"),
    (r"vzero", "clear"),
    (r"vp?(shuf|unpck|insr|extr|insert|extract|alignr)|vmov(lhps|hlps|sldup|shdup|ddup|lps|hps)|vpmov", "shuffle"),
    (r"vp(add|sub|abs|avg)|vp", "vector integer"),
    (r"v", "shuffle"),
    (r"korte?s?t?|ktest", "mask to general"),
    (r"k", "mask"),
    (r"i?mul", "product"),
    (r"i?div", "quotient"),
    (r"cmov|set", "conditional"),
    (r"sh[lr]d?|sa[lr]|ro[lr]", "shift"),
    (r"lea", "address"),
    (r"call", "call"),
    (r"ret|leave", "return"),
    (r"j", "branch"),
    (r"nop|endbr|data16|cs$", "nop"),
    (r"prefetch", "prefetch"),
    (r"rep", "quotient"),
    (r"", "integer"),
)  # fmt: skip
_REGISTER = re.compile(r"%([a-z0-9]+)")
_MOVES = re.compile(r"v?mov(s[sd]|[au]p[sd]|dq[au](8|16|32|64)?|ntp[sd]|ntdq|abs|[dqlwb])?$")
_EXTENDING = re.compile(r"mov[sz][bwl][wlq]$|movs?lq$")
_DECIDING = re.compile(r"(cmp|test|add|sub|and|inc|dec)[qlwb]?$")


def x86_register(name: str) -> str:
    """Canonical name of a register: vectors as "v0" whatever their width."""
    if name[1:3] == "mm":
        return "v" + name[3:]
    known = REGISTERS.get(name)
    return known[0] if known else name


def _names(text: str) -> tuple[str, ...]:
    return tuple(x86_register(name) for name in _REGISTER.findall(text) if name != "rip")


def x86_usage(mnemonic: str, operands: Sequence[str]) -> Usage:
    """Usage of an x86-64 instruction in AT&T syntax."""
    kind = next(kind for pattern, kind in _X86_KINDS if re.match(pattern, mnemonic))
    if kind in ("nop", "clear") or mnemonic == "xchg" and len(set(operands)) == 1:
        return Usage(compute=("clear" if kind == "clear" else "nop", 0))
    if kind == "branch":
        return Usage(compute=("branch", 0), sources=() if mnemonic == "jmp" else (FLAGS,), is_jump=True)
    if kind in ("call", "return"):
        return Usage(compute=(kind, 0))
    masks = tuple(name for text in operands for name in re.findall(r"\{%(k\d)\}", text))
    merges = bool(masks) and not any("{z}" in text for text in operands)
    plain = [re.sub(r"\{[^}]*\}", "", text) for text in operands]
    joined = " ".join(plain)
    if "%tmm" in joined:
        return _x86_tile(mnemonic, plain)
    bits = 512 if "%zmm" in joined else 256 if "%ymm" in joined else 128 if "%xmm" in joined else 0
    vector = bits > 0
    at = next((number for number, text in enumerate(plain) if "(" in text or not text.startswith(("%", "$"))), None)
    memory = _names(plain[at]) if at is not None else ()
    registers = [text for number, text in enumerate(plain) if number != at and text.startswith("%")]
    last = len(plain) - 1
    if kind == "prefetch":
        return Usage(load=("prefetch", 0), address=memory)
    load = ("vector load" if vector else "load", bits)
    store = ("vector store" if vector else "store", bits)
    names = tuple(x86_register(text[1:]) for text in registers)
    if mnemonic in ("push", "pushq"):
        return Usage(store=("store", 0), sources=names)
    if mnemonic in ("pop", "popq"):
        return Usage(load=("load", 0), targets=names)
    if mnemonic.startswith("lea"):
        parts = plain[at].split(",") if at is not None else []
        complex_one = len(parts) == 3 and not plain[at or 0].startswith("(")
        return Usage(compute=("address", 3 if complex_one else 0), sources=memory, targets=names)
    if _MOVES.match(mnemonic) or _EXTENDING.match(mnemonic) or mnemonic.startswith("kmov"):
        if at == last:
            return Usage(store=store, address=memory, sources=names + masks)
        if at is not None:
            return Usage(load=load, address=memory, sources=masks + (names[-1:] if merges else ()), targets=names[-1:])
        return _moved(mnemonic, plain, names, masks, merges, bits)
    if mnemonic.startswith(("vbroadcast", "vpbroadcast", "vmovddup")) and at is not None:
        return Usage(load=load, address=memory, targets=names[-1:])
    if vector and re.match(r"vp?xor", mnemonic) and len(names) == 3 and names[0] == names[1] or mnemonic == "xor" and len(set(plain)) == 1:
        return Usage(compute=("zero", 0), targets=(*names[-1:], *(() if vector else (FLAGS,))))
    if vector or mnemonic.startswith(("v", "k")):
        return _x86_vector(mnemonic, kind, bits, plain, names, masks, merges, at, memory, load, store)
    if mnemonic.startswith(("cmp", "test")):
        return Usage(load if at is not None else None, ("integer", 0), None, memory, names, "", (FLAGS,), "", at is None or "$" not in joined)
    if kind == "quotient" or kind == "product" and len(plain) == 1:
        return Usage(load if at is not None else None, (kind, 0), None, memory, (*names, "rax", "rdx"), "", ("rax", "rdx", FLAGS))
    if mnemonic in ("cltq", "cwtl", "cqto", "cltd"):
        return Usage(compute=("integer", 0), sources=("rax",), targets=("rax",) if mnemonic[1] in "lw" and mnemonic != "cltd" else ("rdx",))
    reads = (FLAGS,) if kind == "conditional" or mnemonic.startswith(("adc", "sbb")) else ()
    writes = () if kind == "conditional" or mnemonic.startswith("not") else (FLAGS,)
    if at == last:
        return Usage(load, (kind, 0), store, memory, names + reads, "", writes)
    if mnemonic.startswith("set"):
        return Usage(compute=("conditional", 0), sources=reads, targets=names)
    three = len(plain) == 3
    sources = (names[:-1] if three else names) + reads
    decides = at is None and bool(_DECIDING.match(mnemonic))
    return Usage(load if at is not None else None, (kind, 0), None, memory, sources, "", (*names[-1:], *writes), "", decides)


def _x86_tile(mnemonic: str, operands: Sequence[str]) -> Usage:
    """Usage of an instruction on tile registers; `tdpbf16ps b, a, sums`."""
    tiles = tuple("t" + text[4:] for text in operands if text.startswith("%tmm"))
    address = tuple(name for text in operands if "(" in text for name in _names(text))
    if mnemonic == "tilezero":
        return Usage(compute=("zero", 0), targets=tiles)
    if mnemonic.startswith("tileload"):
        return Usage(load=("tile load", 0), address=address, targets=tiles)
    if mnemonic == "tilestored":
        return Usage(store=("tile store", 0), address=address, sources=tiles)
    return Usage(compute=("tile product", 0), sources=tiles[:2], accumulator=tiles[2], targets=tiles[2:])


def _moved(mnemonic: str, plain: Sequence[str], names: tuple[str, ...], masks: tuple[str, ...], merges: bool, bits: int) -> Usage:
    """Usage of a move between registers, or of a constant."""
    if mnemonic.startswith("kmov"):
        kind = "mask to general" if plain[-1][1] in "er" else "mask from general" if plain[0][1] in "er" else "mask"
        return Usage(compute=(kind, 0), sources=names[:-1], targets=names[-1:])
    if len(names) < len(plain) or _EXTENDING.match(mnemonic):
        return Usage(compute=("integer", 0), sources=names[:-1], targets=names[-1:])
    kinds = tuple("v" if name[0] == "v" else "g" for name in (names[0], names[-1]))
    if kinds == ("g", "v"):
        return Usage(compute=("to vector", 0), sources=names[:1], targets=names[-1:])
    if kinds == ("v", "g"):
        return Usage(compute=("to general", 0), sources=names[:1], targets=names[-1:])
    if masks:
        return Usage(compute=("blend mask", bits), sources=(names if merges else names[:1]) + masks, targets=names[-1:])
    if len(names) == 3:
        return Usage(compute=("shuffle", bits), sources=names[:2], targets=names[-1:])
    return Usage(compute=("vector move" if bits else "move", bits), sources=names[:1], targets=names[-1:])


def _x86_vector(
    mnemonic: str, kind: str, bits: int, plain: Sequence[str], names: tuple[str, ...], masks: tuple[str, ...], merges: bool, at: int | None,
    memory: tuple[str, ...], load: tuple[str, int], store: tuple[str, int],
) -> Usage:  # fmt: skip
    if at == len(plain) - 1:  # an element or a part that is stored
        return Usage(None, (kind, bits), store, memory, names + masks)
    first = load if at is not None else None
    if kind == "compare flags" or mnemonic.startswith(("kortest", "ktest", "vptest", "vtest")):
        return Usage(first, (kind, bits), None, memory, names, "", (FLAGS,))
    if kind == "compare" and plain[-1].startswith("%k"):
        return Usage(first, ("compare mask", 0), None, memory, names[:-1] + masks, "", names[-1:])
    target, sources = names[-1:], names[:-1] + masks
    if kind == "fma":
        # forms 213 and 132 multiply the target, 231 adds to it
        if "231" in mnemonic:
            return Usage(first, (kind, bits), None, memory, sources, target[0], target)
        return Usage(first, (kind, bits), None, memory, names + masks, "", target)
    if merges or "perm" in mnemonic and "2" in mnemonic:
        sources = names + masks
    if plain[-1].startswith("%") and plain[-1][1] in "er":
        return Usage(first, ("to general", 0), None, memory, sources, "", target)
    return Usage(first, (kind, bits), None, memory, sources, "", target)


_AARCH64_KINDS = (
    (r"fn?m(add|sub|la|ls)$", "fma"),
    (r"fn?mulx?$", "multiply"),
    (r"f(add|sub|abd)$|faddp", "add"),
    (r"f(max|min)|[su](max|min)", "maximum"),
    (r"fcc?mpe?$", "compare flags"),
    (r"f(cmp|acg)|fcm|cm(eq|gt|ge|hi|hs|tst|le|lt)", "compare"),
    (r"fdiv", "divide"),
    (r"fsqrt", "square root"),
    (r"f?cvt|[su]cvtf|fcvt", "convert"),
    (r"frint", "round"),
    (r"fcsel|bsl|bi[ft]$", "blend"),
    (r"fabs|fneg", "logic"),
    (r"movi|mvni", "zero"),
    (r"dup|ins|ext$|zip|uzp|trn|tbl|rev|xtn|umov|smov", "shuffle"),
)
_AARCH64_INTEGER = (
    (r"b$|b\.|br|cbn?z|tbn?z", "branch"),
    (r"bl", "call"),
    (r"ret", "return"),
    (r"nop|hint|bti|dmb|paciasp|autiasp", "nop"),
    (r"prfm", "prefetch"),
    (r"[su]?(mul|madd|msub|mneg|mulh|maddl|mull)l?", "product"),
    (r"[su]div", "quotient"),
    (r"cs|cinc|ccm|cneg", "conditional"),
    (r"lsl|lsr|asr|ror|[su]bf|[su]xt", "shift"),
    (r"mov$", "move"),
    (r"", "integer"),
)
_BITS = MappingProxyType({"q": 128, "v": 128, "d": 64, "s": 32, "h": 16, "b": 8})
_AARCH64_REGISTER = re.compile(r"\b(?:([xw])(\d+|zr)|(w?sp)|([vqdshb])(\d+))\b")


def _aarch64_names(text: str) -> tuple[str, ...]:
    found = []
    for general, number, stack, _, vector in _AARCH64_REGISTER.findall(text):
        if stack:
            found.append("sp")
        elif general and number != "zr":
            found.append(f"x{number}")
        elif vector:
            found.append(f"v{vector}")
    return tuple(found)


def _is_vector(text: str) -> bool:
    return bool(re.match(r"\{?\s*[vqdshb]\d+", text))


def aarch64_usage(mnemonic: str, operands: Sequence[str]) -> Usage:
    """Usage of an AArch64 instruction."""
    at = next((number for number, text in enumerate(operands) if text.startswith("[")), None)
    if at is not None:
        return _aarch64_access(mnemonic, operands, at)
    jump = re.fullmatch(r"bl?|b\.\w+|[ct]bn?z", mnemonic)  # to an address such as b00, which is no register
    vector = not jump and any(map(_is_vector, operands[:2]))
    kind = next((kind for pattern, kind in (_AARCH64_KINDS if vector else _AARCH64_INTEGER) if re.match(pattern, mnemonic)), "")
    if kind in ("nop", "call", "return"):
        return Usage(compute=(kind, 0))
    if kind == "branch":
        reads = (FLAGS,) if mnemonic.startswith("b.") else () if mnemonic == "b" else _aarch64_names(operands[0])
        return Usage(compute=("branch", 0), sources=reads, is_jump=True)
    names = [_aarch64_names(text) for text in operands]
    flat = tuple(name for found in names[1:] for name in found)
    target = names[0][:1]
    if vector:
        letter = re.search(r"[vqdshb]", operands[0]) or re.search(r"[vqdshb]", operands[1])
        bits = 128 if letter and letter[0] in "vq" and ".2s" not in operands[0] else 64
        general = [bool(re.match(r"[xw]\d|[xw]zr", text)) for text in operands[:2]]
        if kind == "compare flags":
            flags = (FLAGS,) if mnemonic.startswith("fcc") else ()
            return Usage(compute=(kind, bits), sources=(*target, *flat, *flags), targets=(FLAGS,))
        if mnemonic in ("fmov", "mov", "dup", "umov", "smov", "ins") and any(general):
            partial = target if "[" in operands[0] else ()
            return Usage(compute=("to general" if general[0] else "to vector", 0), sources=flat + partial, targets=target)
        if mnemonic in ("mov", "fmov", "ins"):
            lane = "[" in operands[0]
            what = "shuffle" if lane or "[" in operands[-1] else "vector move" if flat else "zero"
            return Usage(compute=(what, bits), sources=flat + (target if lane else ()), targets=target)
        if kind == "fma":
            if mnemonic in ("fmla", "fmls"):
                return Usage(compute=(kind, bits), sources=flat, accumulator=target[0], targets=target)
            return Usage(compute=(kind, bits), sources=flat[:2], accumulator=flat[2] if len(flat) > 2 else "", targets=target)
        if mnemonic in ("add", "sub", "neg", "abs"):
            kind = "vector integer"
        elif mnemonic in ("mul", "mla", "mls"):
            kind = "vector multiply"
        elif mnemonic in ("shl", "sshr", "ushr", "sshl", "ushl", "sli", "sri"):
            kind = "vector shift"
        reads_target = mnemonic in ("bsl", "bit", "bif", "mla", "mls", "sli", "sri", "tbx")
        flags = (FLAGS,) if mnemonic == "fcsel" else ()
        return Usage(compute=(kind or "logic", bits), sources=flat + (target if reads_target else ()) + flags, targets=target)
    if kind == "conditional":
        compares = mnemonic.startswith("cc")
        return Usage(compute=(kind, 0), sources=(*(target if compares else ()), *flat, FLAGS), targets=(FLAGS,) if compares else target)
    if mnemonic in ("cmp", "cmn", "tst"):
        return Usage(compute=(_shifting(operands[1:]), 0), sources=(*target, *flat), targets=(FLAGS,))
    if kind == "move" and not flat:
        kind = "integer"
    if kind == "integer" and len(operands) > 3:
        kind = _shifting(operands[2:])
    sets = (FLAGS,) if mnemonic in ("adds", "subs", "ands", "bics", "negs") else ()
    return Usage(compute=(kind, 0), sources=flat + (target if mnemonic in ("movk", "bfi", "bfxil") else ()), targets=(*target, *sets))


def _shifting(operands: Sequence[str]) -> str:
    """The kind of an arithmetic instruction: "address" if its last operand is extended or shifted by more than 4 bits, which takes longer, else
    "integer"."""
    found = re.match(r"(lsl|lsr|asr|[su]xt[bhwx])(?: #(\w+))?", operands[-1]) if len(operands) > 1 else None
    return "address" if found and not (found[1] == "lsl" and int(found[2] or "0", 0) <= 4) else "integer"


def _aarch64_access(mnemonic: str, operands: Sequence[str], at: int) -> Usage:
    address = _aarch64_names(operands[at])
    updated = address[0] if operands[at].endswith("!") or len(operands) > at + 1 else ""
    if mnemonic.startswith("prfm"):
        return Usage(load=("prefetch", 0), address=address)
    names = tuple(name for text in operands[:at] for name in _aarch64_names(text))
    vector = _is_vector(operands[0])
    letter = re.search(r"[vqdshb]", operands[0])
    bits = _BITS[letter[0]] if vector and letter else 0
    lane = bool(re.search(r"\}\[\d+\]", operands[0]))
    count = len(names) if vector else 1
    if mnemonic.startswith("ld"):
        kind = "vector load" if vector else "load pair" if len(names) > 1 else "load"
        if vector and (lane or mnemonic[:3] in ("ld2", "ld3", "ld4") or mnemonic == "ld1r"):
            kind = "broadcast load"
        return Usage(load=(kind, bits), address=address, sources=names if lane else (), targets=names, updated=updated, count=count)
    kind = "vector store" if vector else "store pair" if len(names) > 1 else "store"
    return Usage(store=(kind, bits), address=address, sources=names, updated=updated, count=count)


USAGES = MappingProxyType({"x86-64": x86_usage, "aarch64": aarch64_usage})
