import conveyor as ray
from conveyor.dag import InputNode

# The page does not show these two.
@ray.remote
class Receiver:
    def recv(self, data):
        print("received", data)
        return len(data)

receiver = Receiver.remote()
data = "some data"

# Ray Core API for remote execution.
# ~1ms overhead to invoke `recv`.
ref = receiver.recv.remote(data)
ray.get(ref)

# Compiled Graph for remote execution.
# less than 50us overhead to invoke `recv` (during `graph.execute(data)`).
with InputNode() as inp:
    graph = receiver.recv.bind(inp)

graph = graph.experimental_compile()
ref = graph.execute(data)
ray.get(ref)
