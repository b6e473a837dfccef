//! All server-side I/O: confined access to an export, driver.
