"""In a cluster that somebody else started: makes sure that the device which Ray gave to a process is free.

A role of its own, before all others, so that nothing is loaded onto a device that is taken.
"""

from contextlib import ExitStack

from verl_lite.machine.gpus import ResourceRequest, reserve_gpus
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.worker import Worker


class DeviceHolder(Worker):
    """Looks at the process's device before anything is loaded onto it: its constructor raises UserError if it is taken.

    request: for one device.
    """

    def __init__(self, request: ResourceRequest) -> None:
        self._held = ExitStack()
        self._held.enter_context(reserve_gpus(request, print))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Nothing: there is no model."""
