"""PLACEHOLDER, to be overwritten."""
import pickle, traceback
from conveyor.exceptions import TaskError
def encode_error(exc, actor, node):
    return pickle.dumps((repr(exc), actor, node, "".join(traceback.format_exception(exc))))
def decode_error(meta):
    m, a, n, tb = pickle.loads(meta)
    return TaskError(m+"\n"+tb, None, a, n, tb)
