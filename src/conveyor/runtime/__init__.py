"""Running a Plan: driver, worker, supervisor, results, eager calls."""
