"""Running compiled programs: the executable, its memory, CPU and GPU engines, and artifacts."""

from __future__ import annotations

from tilewright.runtime.artifact import load as load
from tilewright.runtime.artifact import read as read
from tilewright.runtime.executable import Executable as Executable
from tilewright.runtime.executable import Image as Image
from tilewright.runtime.executable import ModuleStamp as ModuleStamp
from tilewright.runtime.executable import executable_of as executable_of
from tilewright.runtime.loadable import LoadableProgram as LoadableProgram
from tilewright.runtime.loadable import loadable as loadable
from tilewright.runtime.plan import Plan as Plan
from tilewright.runtime.signature import Signature as Signature
from tilewright.runtime.signature import positional_signature as positional_signature
from tilewright.runtime.signature import signature_of as signature_of
