//! `[traces]`: where spans of requests go. Pure.

use super::error::Fault;
use super::tree::Field;
use crate::api::{Destination, TraceSettings};

/// `service_name` where it is not given.
const SERVICE_NAME: &str = "tokenrouter";
const LONGEST_NAME: usize = 128;

pub(super) fn traces(field: &Field) -> Result<TraceSettings, Fault> {
    let mut section = field.section()?;
    if !cfg!(feature = "otel") {
        return Err(section.fault(
            "this program was built without traces; leave the table out, or build it with the feature `otel` (cargo \
             has it on unless --no-default-features is given)",
        ));
    }
    let Some(endpoint) = section.take("endpoint") else {
        return Err(
            section.fault("has no `endpoint`; add `endpoint = \"http://127.0.0.1:4318\"`, or leave [traces] out")
        );
    };
    let sample = section.take("sample").map(|f| f.number(0.0..=1.0)).transpose()?.unwrap_or(1.0);
    let service_name = match section.take("service_name") {
        None => SERVICE_NAME.to_owned(),
        Some(field) => match field.text()? {
            name if name.chars().count() <= LONGEST_NAME && !name.chars().any(char::is_control) => name,
            _ => return Err(field.fault(format!("must be 1 to {LONGEST_NAME} characters without control characters"))),
        },
    };
    section.end()?;
    let endpoint = Destination::parse(&endpoint.text()?).map_err(|why| endpoint.fault(why))?;
    Ok(TraceSettings { endpoint, sample, service_name })
}
