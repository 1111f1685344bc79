"""Checks binaries before they are loaded: shared objects of CPU kernels and cubins, byte by byte, in Python alone.

`dlopen` trusts a file. A truncated one ends in SIGBUS, a changed offset in a write to anywhere, and a constructor runs before the first symbol is
looked up. `check_shared_object` follows the loader through everything that it reads: segments, the dynamic section, symbols, hash tables, versions
and relocations must lie inside the file and inside the memory that the file is given. Nothing may run while the file is loaded: it may have no
constructors, destructors, indirect functions, thread-local storage, or libraries except those of C, mathematics and OpenMP. Kernels are linked
without start files, so honest ones have none of these. The loader uses exactly what was checked: relocations must not write to tables or the dynamic
section, since the loader may read again what it has written.

What the machine code does when it is called is not and cannot be checked here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MACHINES = {"x86-64": 62, "aarch64": 183}
"""e_machine by a `Machine`'s architecture."""
CUDA = 190
LARGEST_MEMORY = 1 << 28
"""Limit on the bytes of address space of one shared object; kernels are code and small tables."""
LIBRARIES = frozenset(
    """libc.so.6 libm.so.6 libmvec.so.1 libgomp.so.1 libomp.so libomp.so.5 libiomp5.so libpthread.so.0 libgcc_s.so.1 libatomic.so.1
    ld-linux-x86-64.so.2 ld-linux-aarch64.so.1 libc.musl-x86_64.so.1 libc.musl-aarch64.so.1""".split()
)
RELOCATIONS = {"x86-64": (8, 6, 7, 1), "aarch64": (1027, 1025, 1026, 257)}
"""RELATIVE first, then GLOB_DAT, JUMP_SLOT and an absolute address (psABI): each writes eight bytes."""

LOAD, DYNAMIC, INTERPRETER, NOTE, HEADERS, THREAD_LOCAL = 1, 2, 3, 4, 6, 7
EH_FRAME, STACK, RELRO, PROPERTY = 0x6474E550, 0x6474E551, 0x6474E552, 0x6474E553
SEGMENTS = frozenset({0, LOAD, DYNAMIC, NOTE, HEADERS, EH_FRAME, STACK, RELRO, PROPERTY})
EXECUTE, WRITE, READ = 1, 2, 4
NULL, NOBITS = 0, 8
TAGS = {
    0: "NULL", 1: "NEEDED", 2: "PLTRELSZ", 3: "PLTGOT", 4: "HASH", 5: "STRTAB", 6: "SYMTAB", 7: "RELA", 8: "RELASZ", 9: "RELAENT", 10: "STRSZ",
    11: "SYMENT", 16: "SYMBOLIC", 20: "PLTREL", 23: "JMPREL", 24: "BIND_NOW", 30: "FLAGS", 0x6FFFFEF5: "GNU_HASH", 0x6FFFFFF0: "VERSYM",
    0x6FFFFFF9: "RELACOUNT", 0x6FFFFFFB: "FLAGS_1", 0x6FFFFFFE: "VERNEED", 0x6FFFFFFF: "VERNEEDNUM", 0x70000001: "BTI_PLT", 0x70000003: "PAC_PLT",
}  # fmt: skip
"""Entries that a kernel's dynamic section may have. Excluded are entries that run code (INIT, FINI and their arrays), search paths of libraries
(RPATH, RUNPATH, AUDIT, FILTER), the name under which the process would find this file in place of a library (SONAME), and relocations of code
(TEXTREL)."""
TOGETHER = (("RELA", "RELASZ", "RELAENT"), ("JMPREL", "PLTRELSZ", "PLTREL"), ("VERSYM", "VERNEED", "VERNEEDNUM"))
"""Groups of entries: the loader takes the presence of one to mean that the others are present."""
SYMBOL_BYTES, RELOCATION_BYTES, ENTRY_BYTES = 24, 24, 16
FUNCTION, GLOBAL, WEAK = 2, 1, 2


class _Bytes:
    """The bytes of a file; reading beyond them raises ValueError."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def require(self, start: int, count: int, what: str) -> None:
        if start < 0 or count < 0 or start + count > len(self.data):
            raise ValueError(f"{what} (bytes {start} to {start + count}) ends beyond the file's {len(self.data)} bytes")

    def take(self, form: str, at: int, what: str) -> tuple[int, ...]:
        self.require(at, struct.calcsize("<" + form), what)
        return struct.unpack_from("<" + form, self.data, at)

    def text(self, at: int, end: int, what: str) -> str:
        """The printable text at an offset, which must end with a zero byte before `end`."""
        stop = self.data.find(b"\0", at, end) if 0 <= at < end else -1
        if stop < 0:
            raise ValueError(f"{what} is no string of the file")
        text = self.data[at:stop].decode("latin-1")
        if not (text.isascii() and text.isprintable()):
            raise ValueError(f"{what} is no name: {text!a}")
        return text


@dataclass(frozen=True)
class _Segment:
    kind: int
    flags: int
    offset: int
    address: int
    in_file: int
    in_memory: int
    alignment: int

    def holds(self, address: int, count: int, in_file: bool = False) -> bool:
        return self.address <= address and address + count <= self.address + (self.in_file if in_file else self.in_memory)

    def meets(self, address: int, count: int) -> bool:
        return address < self.address + self.in_memory and self.address < address + count


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class _File:
    """Header, segments and sections of a file, all of which lie inside it."""

    bytes: _Bytes
    flags: int
    abi: int
    header_at: int
    """Offset of the program header table."""
    segments: tuple[_Segment, ...]
    sections: tuple[_Section, ...]


def _read(data: bytes, machine: int, kind: int, abis: Sequence[int]) -> _File:
    file = _Bytes(data)
    file.require(0, 64, "the ELF header")
    if data[:4] != b"\x7fELF":
        raise ValueError("it is no ELF file")
    if data[4:7] != b"\x02\x01\x01" or data[7] not in abis:
        raise ValueError("it is no 64-bit, little-endian ELF file of a known kind")
    found, of, version, _, program_at, section_at, flags, size, program_size, programs, section_size, sections, names = file.take(
        "HHIQQQIHHHHHH", 16, "the ELF header"
    )
    if of != machine:
        raise ValueError(f"it is for the ELF machine {of}, not {machine}")
    if found != kind or version != 1 or size != 64:
        raise ValueError(f"its ELF type is {found}, not {kind}")
    if (programs and program_size != 56) or programs > 64 or section_size != 64 or not 0 < sections < 0xFF00 or names >= sections:
        raise ValueError("its tables of segments and sections are malformed")
    file.require(program_at, 56 * programs, "the table of segments")
    file.require(section_at, 64 * sections, "the table of sections")
    segments = []
    for index in range(programs):
        kind_, segment_flags, offset, address, _, in_file, in_memory, alignment = file.take("IIQQQQQQ", program_at + 56 * index, "a segment")
        file.require(offset, in_file, f"segment {index}")
        segments.append(_Segment(kind_, segment_flags, offset, address, in_file, in_memory, alignment))
    rows = [file.take("IIQQQQIIQQ", section_at + 64 * index, "a section") for index in range(sections)]
    for index, (_, kind_, _, _, offset, count, *_) in enumerate(rows):
        if kind_ not in (NULL, NOBITS):
            file.require(offset, count, f"section {index}")
    start, end = rows[names][4], rows[names][4] + rows[names][5]
    read = tuple(_Section(file.text(start + row[0], end, "a section's name"), row[1], row[4], row[5], row[6]) for row in rows)
    return _File(file, flags, data[7], program_at, tuple(segments), read)


def check_shared_object(data: bytes, architecture: str, entries: Sequence[str], others: Sequence[str] = ()) -> None:
    """Checks that a shared object can be loaded safely and has these functions.

    Args:
        data: the whole file.
        architecture: that of its `Machine`, "x86-64" or "aarch64".
        others: names of further symbols that it must have.

    Raises:
        ValueError: with the reason, if it fails the check.
    """
    if architecture not in MACHINES:
        raise ValueError(f"the architecture {architecture!r} is not known")
    _SharedObject(_read(data, MACHINES[architecture], 3, (0, 3)), architecture).check(entries, others)


def check_cubin(data: bytes, architecture: str, entries: Sequence[str], others: Sequence[str] = ()) -> None:
    """Checks that a cubin is complete, is for the architecture (such as "sm_90a"), and has these kernels and other symbols. The driver checks it
    again.

    Raises:
        ValueError: with the reason, if it fails the check.
    """
    file = _read(data, CUDA, 2, (0x33, 0x41))
    number = file.flags >> 8 & 0xFF if file.abi == 0x41 else file.flags & 0xFF  # CUDA 13 and CUDA 12 store it in different places
    if f"{number}" != architecture.removeprefix("sm_").rstrip("af"):
        raise ValueError(f"it is for sm_{number}, not {architecture}")
    tables = [section for section in file.sections if section.name == ".symtab"]
    if len(tables) != 1 or tables[0].link >= len(file.sections):
        raise ValueError("it has no table of symbols")
    (table,), strings = tables, file.sections[tables[0].link]
    found, kernels = set(), set()
    for at in range(table.offset, table.offset + table.size - SYMBOL_BYTES + 1, SYMBOL_BYTES):
        name, info, _, section, _, _ = file.bytes.take("IBBHQQ", at, "a symbol")
        if 0 < section < len(file.sections):
            text = file.bytes.text(strings.offset + name, strings.offset + strings.size, "a symbol's name")
            found.add(text)
            if info & 15 == FUNCTION and info >> 4 == GLOBAL and file.sections[section].name == f".text.{text}":
                kernels.add(text)
    missing = [*(entry for entry in entries if entry not in kernels), *(other for other in others if other not in found)]
    if missing:
        raise ValueError(f"it has no kernel {missing[0]}")


class _SharedObject:
    """One file as the loader sees it, with addresses in segments."""

    def __init__(self, file: _File, architecture: str) -> None:
        self.file = file
        self.bytes = file.bytes
        self.architecture = architecture
        self.loads = [segment for segment in file.segments if segment.kind == LOAD]
        self.tags: dict[str, int] = {}
        self.needed: list[str] = []

    def check(self, entries: Sequence[str], others: Sequence[str]) -> None:
        self._check_segments()
        self._read_dynamic()
        versions = self._check_versions()
        named = self._exported(versions)
        self._check_relocations(versions)
        missing = [name for name in (*entries, *others) if name not in named]
        if missing:
            raise ValueError(f"it has no function {missing[0]}")
        for entry in entries:
            _, info, other, section, address, size = self._symbol(named[entry], versions)
            code = any(segment.flags & EXECUTE and segment.holds(address, max(size, 1), in_file=True) for segment in self.loads)
            if info & 15 != FUNCTION or info >> 4 not in (GLOBAL, WEAK) or other & 3 or not section or not code:
                raise ValueError(f"{entry} is no function of it")

    # Memory

    def _check_segments(self) -> None:
        end = 0
        unit = max((segment.alignment for segment in self.loads), default=0)  # pages may be this large, and are protected as a whole
        for segment in self.loads:
            page = segment.alignment
            if page < 4096 or page & (page - 1) or page > 1 << 21 or (segment.address - segment.offset) % page:
                raise ValueError("a segment is not aligned")
            if segment.address // unit * unit < end or segment.in_memory < segment.in_file or segment.in_memory > LARGEST_MEMORY:
                raise ValueError("its segments overlap, or one is larger than any kernel")
            if segment.flags & WRITE and segment.flags & EXECUTE or not segment.flags & READ:
                raise ValueError("a segment may be both written and executed, or not be read")
            if segment.in_memory > segment.in_file and not segment.flags & WRITE:
                raise ValueError("a segment that may not be written is longer in memory than in the file")
            end = -(-(segment.address + segment.in_memory) // unit) * unit
        if not self.loads or self.loads[0].address or end > LARGEST_MEMORY:
            raise ValueError("it has no segments to load from address 0 on, or needs more memory than any kernel")
        first, table, size = self.loads[0], self.file.header_at - self.loads[0].offset, 56 * len(self.file.segments)
        if first.flags & WRITE or not first.holds(table, size, in_file=True):
            raise ValueError("its table of segments lies outside of the first one, or may be written")
        stacks = [segment for segment in self.file.segments if segment.kind == STACK]
        if len(stacks) != 1 or stacks[0].flags & EXECUTE:
            raise ValueError("it asks for a stack that may be executed")
        for segment in self.file.segments:
            if segment.kind not in SEGMENTS:
                raise ValueError(f"it has a segment of the kind {segment.kind:#x}, which kernels do not have")
            if segment.kind in (LOAD, STACK, 0):
                continue
            inside = [load for load in self.loads if load.holds(segment.address, segment.in_memory)]
            if not inside or segment.in_file > segment.in_memory or (segment.kind in (DYNAMIC, RELRO) and not inside[0].flags & WRITE):
                raise ValueError("a segment lies outside of what is loaded")
            if segment.kind == HEADERS and (segment.address, segment.in_file, segment.in_memory) != (table, size, size):
                raise ValueError("a second table of segments lies elsewhere")
            if segment.kind in (NOTE, PROPERTY):
                self._check_notes(segment)

    def _check_notes(self, segment: _Segment) -> None:
        at, end = self._offset(segment.address, segment.in_memory, "a note"), segment.in_memory
        end += at
        while end - at >= 12:
            name, description, kind = self.bytes.take("III", at, "a note")
            unit = 8 if segment.alignment == 8 else 4
            body = at + 12 + -(-name // 4) * 4
            at = body + -(-description // unit) * unit
            if at > end:
                raise ValueError("a note ends beyond its segment")
            if kind == 5 and name == 4:  # properties of the program, which the loader reads
                inner = body
                while body + description - inner >= 8:
                    inner += 8 + -(-self.bytes.take("II", inner, "a property")[1] // 8) * 8
                if inner != body + description:
                    raise ValueError("a property ends beyond its note")

    def _offset(self, address: int, count: int, what: str, written: bool = False) -> int:
        """The file offset of a range of memory. Raises ValueError if the range is not loaded from the file, or if its writability differs from
        `written`: relocations may overwrite writable data after it was checked here."""
        for segment in self.loads:
            if segment.holds(address, count, in_file=True) and bool(segment.flags & WRITE) == written:
                return segment.offset + address - segment.address
        raise ValueError(f"{what} (address {address:#x}) lies outside of what is loaded{'' if written else ' and may not be written'}")

    def _check_written(self, address: int, count: int, what: str) -> None:
        """Checks a range that the loader writes: it must be writable and outside the dynamic section."""
        if not any(segment.flags & WRITE and segment.holds(address, count) for segment in self.loads):
            raise ValueError(f"{what} lies outside of what may be written")
        if self.dynamic.meets(address, count):
            raise ValueError(f"{what} lies in the dynamic section")

    # The dynamic section

    def _read_dynamic(self) -> None:
        sections = [segment for segment in self.file.segments if segment.kind == DYNAMIC]
        if len(sections) != 1:
            raise ValueError("it has no dynamic section, or several")
        self.dynamic = sections[0]
        at = self._offset(self.dynamic.address, self.dynamic.in_file, "the dynamic section", written=True)
        names = []
        for entry in range(at, at + self.dynamic.in_file - ENTRY_BYTES + 1, ENTRY_BYTES):
            tag, value = self.bytes.take("QQ", entry, "the dynamic section")
            label = TAGS.get(tag)
            if label is None:
                raise ValueError(f"its dynamic section has an entry {tag:#x}, which kernels do not have")
            if label == "NULL":
                break
            if label == "NEEDED":
                names.append(value)
            elif label in self.tags:
                raise ValueError(f"its dynamic section has two entries {label}")
            else:
                self.tags[label] = value
        else:
            raise ValueError("its dynamic section does not end")
        missing = {"STRTAB", "STRSZ", "SYMTAB", "SYMENT"} - self.tags.keys()
        if missing or not {"GNU_HASH", "HASH"} & self.tags.keys():
            raise ValueError("its dynamic section lacks symbols or strings")
        if any(0 < len(self.tags.keys() & group) < len(group) for group in TOGETHER):
            raise ValueError("its relocations or versions are incomplete")
        if self.tags["SYMENT"] != SYMBOL_BYTES or self.tags.get("RELAENT", RELOCATION_BYTES) != RELOCATION_BYTES or self.tags.get("PLTREL", 7) != 7:
            raise ValueError("its symbols or relocations are of another form")
        if self.tags.get("FLAGS", 0) & ~8 or self.tags.get("FLAGS_1", 0) & ~1:
            raise ValueError("it asks to be loaded in a way in which kernels are not")
        self.strings = self._offset(self.tags["STRTAB"], self.tags["STRSZ"], "the table of strings")
        self.symbols = self._offset(self.tags["SYMTAB"], SYMBOL_BYTES, "the table of symbols")
        for value in names:
            self.needed.append(self._string(value))
            if self.needed[-1] not in LIBRARIES:
                raise ValueError(f"it needs the library {self.needed[-1]}, which kernels do not")
        if "PLTGOT" in self.tags:
            self._check_written(self.tags["PLTGOT"], 24, "its table of addresses")

    def _string(self, at: int) -> str:
        return self.bytes.text(self.strings + at, self.strings + self.tags["STRSZ"], "a name")

    # Symbols

    def _symbol(self, index: int, versions: int | None) -> tuple[int, int, int, int, int, int]:
        """(name, info, other, section, address, size) of a symbol that the loader may read."""
        at = self._offset(self.tags["SYMTAB"] + SYMBOL_BYTES * index, SYMBOL_BYTES, f"symbol {index}")
        name, info, other, section, address, size = self.bytes.take("IBBHQQ", at, f"symbol {index}")
        self._string(name)
        if info & 15 > 3 or info >> 4 > 2:
            raise ValueError(f"symbol {index} is of a kind that kernels do not have")
        if versions is not None:
            place = self._offset(self.tags["VERSYM"] + 2 * index, 2, "the table of versions")
            if self.bytes.take("H", place, "a version")[0] & 0x7FFF > versions:
                raise ValueError(f"symbol {index} has a version that is not there")
        return name, info, other, section, address, size

    def _exported(self, versions: int | None) -> dict[str, int]:
        """The symbols that can be reached through hash tables, by name."""
        indices = set(self._gnu_hash() if "GNU_HASH" in self.tags else ()) | set(self._hash() if "HASH" in self.tags else ())
        return {self._string(self._symbol(index, versions)[0]): index for index in sorted(indices)}

    def _words(self, address: int, count: int, what: str) -> tuple[int, ...]:
        if count > len(self.bytes.data):
            raise ValueError(f"{what} is larger than the file")
        return self.bytes.take(f"{count}I", self._offset(address, 4 * count, what), what)

    def _gnu_hash(self) -> Iterator[int]:
        at, what = self.tags["GNU_HASH"], "the hash table"
        buckets, first, words, shift = self._words(at, 4, what)
        if not buckets or not words or words & (words - 1) or shift > 63:
            raise ValueError("its hash table is malformed")
        self._words(at + 16, 2 * words, what)
        start = at + 16 + 8 * words
        chains = start + 4 * buckets
        seen: set[int] = set()
        for index in self._words(start, buckets, what):
            if index and index < first:
                raise ValueError("its hash table is malformed")
            while index and index not in seen:
                seen.add(index)
                yield index
                index = 0 if self._words(chains + 4 * (index - first), 1, what)[0] & 1 else index + 1

    def _hash(self) -> Iterator[int]:
        at, what = self.tags["HASH"], "the hash table"
        buckets, count = self._words(at, 2, what)
        if not buckets:
            raise ValueError("its hash table is malformed")
        heads, chains = self._words(at + 8, buckets, what), self._words(at + 8 + 4 * buckets, count, what)
        for index in heads:
            for _ in range(count):
                if not index:
                    break
                if index >= count:
                    raise ValueError("its hash table is malformed")
                yield index
                index = chains[index]
            else:
                raise ValueError("its hash table does not end")

    def _check_versions(self) -> int | None:
        """The highest symbol version number; None if there are no versions. The loader requests the needed versions from the libraries."""
        if "VERSYM" not in self.tags:
            return None
        at, records, read, largest = self.tags["VERNEED"], self.tags["VERNEEDNUM"], 0, 0
        malformed = ValueError("its versions are malformed")
        if not 0 < records <= len(self.needed):
            raise malformed
        for record in range(records):  # the loader follows the offset of the next record, whatever the counts say
            _, count, library, aside, onwards = self.bytes.take("HHIII", self._offset(at, 16, "a version"), "a version")
            if self._string(library) not in self.needed:
                raise ValueError("it needs a version of a library that it does not need")
            inner, read = at + aside, read + count
            if not count or bool(onwards) != (record < records - 1) or 16 * read > len(self.bytes.data):
                raise malformed
            for index in range(count):
                _, _, other, name, further = self.bytes.take("IHHII", self._offset(inner, 16, "a version"), "a version")
                if bool(further) != (index < count - 1) or other & 0x7FFF < 2:
                    raise malformed
                self._string(name)
                largest = max(largest, other & 0x7FFF)
                inner += further
            at += onwards
        return largest

    def _check_relocations(self, versions: int | None) -> None:
        """Each relocation writes eight bytes, none of which the loader reads."""
        types = RELOCATIONS[self.architecture]
        relative = self.tags.get("RELACOUNT", 0)
        sizes = (("RELA", "RELASZ"), ("JMPREL", "PLTRELSZ"))
        (first, end), (second, last) = ((self.tags.get(table, 0), self.tags.get(table, 0) + self.tags.get(size, 0)) for table, size in sizes)
        if first < last and second < end:  # if they end together, the loader treats one as part of the other
            raise ValueError("its tables of relocations overlap")
        for table, size in sizes:
            if self.tags.get(size, 0) % RELOCATION_BYTES:
                raise ValueError("its relocations are malformed")
            count = self.tags.get(size, 0) // RELOCATION_BYTES
            at = self._offset(self.tags[table], self.tags[size], "the relocations") if count else 0
            for index in range(count):
                where, info, _ = self.bytes.take("QQq", at + RELOCATION_BYTES * index, "a relocation")
                kind = info & 0xFFFFFFFF
                if kind not in types or (table == "RELA" and index < relative and kind != types[0]):
                    raise ValueError(f"a relocation is of the kind {kind}, which kernels do not have")
                self._check_written(where, 8, "what a relocation writes")
                self._symbol(info >> 32, versions)
            if table == "RELA" and relative > count:
                raise ValueError("its relocations are malformed")
