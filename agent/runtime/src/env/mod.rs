//! Ready environments.
