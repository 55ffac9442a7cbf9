"""What the load log says besides sizes and progress."""

from troupellm.kernels.native.build import to_be_built
from troupellm.protocol.worker import LoadProgress, ProgressSink


def tell_compiling(progress: ProgressSink, *, on_cpu: bool) -> None:
    """Say why the first start on a machine takes longer."""
    if on_cpu and to_be_built():
        progress(LoadProgress(phase="resolve", detail="compiling the CPU's kernels, once on this machine"))
