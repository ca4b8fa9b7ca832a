import conveyor as ray

@ray.remote
class EchoActor:
  def echo(self, msg):
    return msg

N = 3
actors = [EchoActor.remote() for _ in range(N)]

# Define a DAG for lazy execution.
with ray.dag.InputNode() as inp:
  # Bind each actor task to the same input placeholder.
  outputs = [actor.echo.bind(inp) for actor in actors]
  dag = ray.dag.MultiOutputNode(outputs)

cdag = dag.experimental_compile()
# Execute the DAG with different arguments:
print(ray.get(cdag.execute("hello")))
# Expected: ["hello", "hello", "hello"]

with ray.dag.InputNode() as inp:
  for actor in actors:
    # Pass each actor task output as input to the next actor task.
    inp = actor.echo.bind(inp)
  dag = inp

cdag = dag.experimental_compile()
# Call dag.execute() several times. The executions will be pipelined across the different actors.
refs = [cdag.execute(f"hello{i}") for i in range(N)]
# Get the results, flushing the pipeline.
print(ray.get(refs))
# Expected: ["hello0", "hello1", "hello2"]
