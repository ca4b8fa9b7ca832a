"""Who hosts actors; implements the protocol that `conveyor.runtime` defines."""
