//! Evaluation: how many questions a route answers correctly, and who wrote the tokens. Pure: the command
//! reads, asks and writes.

pub mod answer;
pub mod bisect;
pub mod dataset;
pub mod plot;
pub mod report;
pub mod resume;
pub mod statistics;
pub mod summary;
pub mod sweep;
