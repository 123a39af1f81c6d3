"""The REST routes: routing, access control, access log, bodies, health and state pages."""
