//! The keys of `[server]` about who may ask, how much, and by which way. Pure.

use std::path::PathBuf;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method};

use super::error::Fault;
use super::key::{ApiKey, api_keys};
use super::tree::{Field, Section};
use crate::api::{Cors, Limits, MetricsAccess, TlsFiles};

#[derive(Clone, Debug, PartialEq)]
pub struct FrontConfig {
    pub api_keys: Vec<ApiKey>,
    /// As written; see [`super::Config::directory`].
    pub api_key_file: Option<PathBuf>,
    pub metrics: MetricsAccess,
    pub cors: Option<Cors>,
    pub limits: Limits,
    /// Paths as written.
    pub tls: Option<TlsFiles>,
    /// Path as written, and its mode.
    pub unix_socket: Option<(PathBuf, u32)>,
    /// Whether `host` and `port` are listened at.
    pub tcp: bool,
    /// How long new requests are still taken after the signal to stop.
    pub drain_grace: Duration,
}

impl Default for FrontConfig {
    fn default() -> Self {
        Self {
            api_keys: Vec::new(),
            api_key_file: None,
            metrics: MetricsAccess::default(),
            cors: None,
            limits: Limits::default(),
            tls: None,
            unix_socket: None,
            tcp: true,
            drain_grace: Duration::ZERO,
        }
    }
}

/// Mode of a socket where none is given: for the user and its group.
const SOCKET_MODE: u32 = 0o660;

/// `admin_key`: whether there is one.
pub(super) fn front(section: &mut Section, admin_key: bool) -> Result<FrontConfig, Fault> {
    let (api_keys, api_key_file) = (api_keys(section)?, section.take("api_key_file").map(path).transpose()?);
    let metrics = match section.take("metrics_access") {
        None => MetricsAccess::default(),
        Some(field) => match field.text()?.as_str() {
            "open" => MetricsAccess::Open,
            "api_key" => MetricsAccess::ApiKey,
            "admin_key" if admin_key => MetricsAccess::AdminKey,
            "admin_key" => return Err(field.fault("there is none; set server.admin_key")),
            _ => return Err(field.fault("must be \"open\", \"api_key\" or \"admin_key\"")),
        },
    };
    let (cors, limits, tls) = (cors(section)?, limits(section)?, section.take("tls").map(tls).transpose()?);
    let mode = section.take("unix_socket_mode");
    let unix_socket = match (section.take("unix_socket"), mode) {
        (None, None) => None,
        (None, Some(mode)) => return Err(mode.fault("there is no socket; set server.unix_socket")),
        (Some(socket), mode) => Some((path(socket)?, mode.map_or(Ok(SOCKET_MODE), |mode| octal(&mode))?)),
    };
    let tcp = match section.take("tcp") {
        None => true,
        Some(field) => match field.boolean()? {
            false if unix_socket.is_none() => return Err(field.fault("then set server.unix_socket")),
            false if tls.is_some() => return Err(field.fault("TLS is for TCP alone; leave out one of them")),
            tcp => tcp,
        },
    };
    let drain_grace = seconds(section, "drain_grace_s", 0.0)?.unwrap_or_default();
    Ok(FrontConfig { api_keys, api_key_file, metrics, cors, limits, tls, unix_socket, tcp, drain_grace })
}

fn path(field: Field) -> Result<PathBuf, Fault> {
    Ok(field.text()?.into())
}

fn octal(field: &Field) -> Result<u32, Fault> {
    let mode = field.text().ok().and_then(|text| u32::from_str_radix(&text, 8).ok());
    mode.filter(|mode| *mode <= 0o777).ok_or_else(|| field.fault("must be a mode such as \"660\""))
}

/// At least `least`, at most a day.
fn seconds(section: &mut Section, key: &'static str, least: f64) -> Result<Option<Duration>, Fault> {
    section.take(key).map(|field| Ok(Duration::from_secs_f64(field.number(least..=86400.0)?))).transpose()
}

fn limits(section: &mut Section) -> Result<Limits, Fault> {
    let default = Limits::default();
    let mut count = |key, least: i64, most: i64| -> Result<Option<usize>, Fault> {
        section.take(key).map(|field| Ok(field.integer(least..=most)? as usize)).transpose()
    };
    let many = 1 << 20;
    let connections = count("max_connections", 1, many)?.unwrap_or(default.connections);
    let connections_per_peer = count("max_connections_per_peer", 1, many)?;
    let url_bytes = count("max_url_bytes", 256, 65536)?.unwrap_or(default.url_bytes);
    let headers = count("max_headers", 16, 4096)?.unwrap_or(default.headers);
    let header_bytes = count("max_header_bytes", 4096, 1 << 20)?.unwrap_or(default.header_bytes);
    let requests_per_client = count("max_requests_per_client", 1, many)?;
    let queued_requests = count("max_queued_requests", 0, many)?.unwrap_or(default.queued_requests);
    let queued_tokens = count("max_queued_tokens", 1, 1 << 40)?;
    let mut time = |key, default: Duration| Ok(seconds(section, key, 0.1)?.unwrap_or(default));
    Ok(Limits {
        connections,
        connections_per_peer,
        url_bytes,
        headers,
        header_bytes,
        header_timeout: time("header_timeout_s", default.header_timeout)?,
        idle_timeout: default.idle_timeout,
        body_timeout: time("body_timeout_s", default.body_timeout)?,
        write_timeout: time("write_timeout_s", default.write_timeout)?,
        request_timeout: seconds(section, "request_timeout_s", 0.1)?,
        requests_per_client,
        queued_requests,
        queued_tokens,
    })
}

fn cors(section: &mut Section) -> Result<Option<Cors>, Fault> {
    let origins = section.take("cors_origins");
    let (headers, methods) = (section.take("cors_headers"), section.take("cors_methods"));
    let credentials = section.take("cors_credentials");
    let Some(field) = origins else {
        return match [headers, methods, credentials].into_iter().flatten().next() {
            None => Ok(None),
            Some(field) => Err(field.fault("goes with server.cors_origins, which is not set")),
        };
    };
    let credentials = credentials.map(|field| field.boolean()).transpose()?.unwrap_or(false);
    let written = field.array("strings")?;
    let any = written.iter().any(|origin| origin.text().is_ok_and(|text| text == "*"));
    let origins = match any {
        true if credentials => {
            return Err(field.fault("with cors_credentials every page could act for its visitors; list the origins"));
        }
        true if written.len() > 1 => return Err(field.fault("\"*\" stands for all origins; leave out the others")),
        true => None,
        false => Some(written.iter().map(origin).collect::<Result<_, Fault>>()?),
    };
    let headers = match headers {
        None => ["authorization", "content-type", "x-api-key", "x-request-id"].map(HeaderName::from_static).into(),
        Some(field) => field.array("strings")?.iter().map(header).collect::<Result<_, _>>()?,
    };
    let methods = match methods {
        None => vec![Method::GET, Method::POST],
        Some(field) => field.array("strings")?.iter().map(method).collect::<Result<_, _>>()?,
    };
    Ok(Some(Cors { origins, headers, methods, credentials }))
}

fn origin(field: &Field) -> Result<HeaderValue, Fault> {
    let text = field.text()?;
    let wrong = || field.fault("must be an origin as browsers send it, for example \"https://chat.example.com\"");
    let (_, host) = text.split_once("://").ok_or_else(wrong)?;
    if host.is_empty() || host.contains('/') || text.bytes().any(|b| b.is_ascii_uppercase() || !b.is_ascii_graphic()) {
        return Err(wrong());
    }
    HeaderValue::from_str(&text).map_err(|_| wrong())
}

fn header(field: &Field) -> Result<HeaderName, Fault> {
    field.text()?.to_ascii_lowercase().parse().map_err(|_| field.fault("must be the name of a header"))
}

fn method(field: &Field) -> Result<Method, Fault> {
    match field.text()?.as_str() {
        "GET" => Ok(Method::GET),
        "POST" => Ok(Method::POST),
        _ => Err(field.fault("must be \"GET\" or \"POST\"; the server has no others")),
    }
}

fn tls(field: Field) -> Result<TlsFiles, Fault> {
    let mut section = field.section()?;
    let (cert, key) = (section.take("cert"), section.take("key"));
    let client_ca = section.take("client_ca").map(path).transpose()?;
    let (Some(cert), Some(key)) = (cert, key) else {
        return Err(section.fault("needs `cert` and `key`, files in PEM"));
    };
    section.end()?;
    Ok(TlsFiles { cert: path(cert)?, key: path(key)?, client_ca })
}
