import conveyor as ray

@ray.remote
class EchoActor:
  def echo(self, msg):
    return msg

a = EchoActor.remote()
b = EchoActor.remote()

msg_ref = a.echo.remote("hello")
msg_ref = b.echo.remote(msg_ref)
print(ray.get(msg_ref))

import conveyor.dag
import time

# Define a DAG for lazy execution.
with ray.dag.InputNode() as inp:
  # Bind the actor task to an input placeholder.
  intermediate_inp = a.echo.bind(inp)
  dag = b.echo.bind(intermediate_inp)

# Execute the DAG with different arguments:
print(ray.get(dag.execute("hello")))
print(ray.get(dag.execute("world")))

# Time the execution:
for _ in range(10):
  start = time.perf_counter()
  ray.get(dag.execute("hello"))
  print("took", time.perf_counter() - start)

# Compile the DAG.
cdag = dag.experimental_compile()
print(cdag)

# Time the execution with aDAG
for _ in range(10):
  start = time.perf_counter()
  ray.get(cdag.execute("hello"))
  print("took", time.perf_counter() - start)

# Tear down the DAG
cdag.teardown()

print(ray.get(a.echo.remote("done")))
