"""The REST routes: routing, access control, access log, request bodies, health and state pages."""
