"""A stand-in for `azureml.core` in a job of agentd: `Run`, and what belongs to it. It calls no service of the cloud."""
import sys
import types

from azureml.core.run import Experiment, Model, Run, Workspace

VERSION = "0+agentd"
__version__ = VERSION
__all__ = ["Experiment", "Model", "Run", "Workspace"]


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        # An AttributeError would lose these words in `from azureml.core import NAME`.
        raise ImportError(
            "`azureml.core` is agentd's stand-in for the SDK v1, and has no `{}`; it has {}. For the whole of it, "
            "add azureml-core to the packages of the job".format(name, ", ".join(__all__))
        )


sys.modules[__name__].__class__ = _StandIn
