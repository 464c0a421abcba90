"""A worker that holds a device for a run, before any model is loaded onto it."""

from contextlib import ExitStack

from verl_lite.machine.gpus import ResourceRequest, reserve_gpus
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.worker import Worker


class DeviceHolder(Worker):
    """Reserves the device that an existing Ray cluster assigned to the process of this worker.

    It is a separate role that starts before all others, so that no model is loaded onto a device that another process
    uses.

    Args:
        request: the request for one device.

    Raises:
        UserError: another process uses the device.
    """

    def __init__(self, request: ResourceRequest) -> None:
        self._reservation = ExitStack()
        self._reservation.enter_context(reserve_gpus(request, print))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Does nothing, because this role has no model."""
