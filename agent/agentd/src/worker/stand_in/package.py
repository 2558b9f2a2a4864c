"""The name `azureml`, shared with packages of that name: this stand-in comes last.

Every installed package is looked through before it, so `azureml.core` is the real one where that is installed.
"""
import pkgutil

_own = list(__path__)
__path__ = [place for place in pkgutil.extend_path(__path__, __name__) if place not in _own] + _own
