"""What runs beside the serving fleet: publishing, routing. Imports `schemas` only."""
