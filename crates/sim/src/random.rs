//! Seeded histories, to come.
