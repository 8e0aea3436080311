//! Where spans are sent. Pure.

use std::fmt;

use axum::http::Uri;

/// What a collector's path for traces ends in.
const PATH: &str = "/v1/traces";

/// A collector, by the URL that its signals have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// A name or an address, without brackets.
    pub host: String,
    pub port: u16,
    /// Host and port as written.
    pub authority: String,
    /// Of the requests.
    pub path: String,
}

impl Destination {
    /// Read a URL such as `http://127.0.0.1:4318`. The error says what it must be.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let url: Uri = text.parse().map_err(|_| "must be a URL, for example \"http://127.0.0.1:4318\"")?;
        match url.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err("spans are sent without TLS; give the http:// URL of a collector that is near");
            }
            _ => return Err("must begin with http://, for example \"http://127.0.0.1:4318\""),
        }
        let authority = url.authority().filter(|authority| !authority.host().is_empty()).ok_or("has no host")?;
        if authority.as_str().contains('@') {
            return Err("must not have a user or a password");
        }
        if url.query().is_some() {
            return Err("must not have a query");
        }
        let base = url.path().trim_end_matches('/');
        if base.ends_with(PATH) {
            return Err("is where requests go already; leave out /v1/traces, which is put behind it");
        }
        // The parser's own port is none for one that is out of range.
        let port = match authority.as_str().strip_prefix(authority.host()) {
            Some("") => 80,
            rest => {
                let port = rest.and_then(|rest| rest.strip_prefix(':')?.parse().ok()).filter(|port| *port > 0);
                port.ok_or("must have a port from 1 to 65535")?
            }
        };
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        Ok(Self { host, port, authority: authority.to_string(), path: format!("{base}{PATH}") })
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_collectors() {
        for (text, host, port, shown) in [
            ("http://127.0.0.1:4318", "127.0.0.1", 4318, "http://127.0.0.1:4318/v1/traces"),
            ("http://otel.example/", "otel.example", 80, "http://otel.example/v1/traces"),
            ("http://[::1]:9/a/b/", "::1", 9, "http://[::1]:9/a/b/v1/traces"),
        ] {
            let endpoint = Destination::parse(text).unwrap();
            assert_eq!((endpoint.host.as_str(), endpoint.port, endpoint.to_string().as_str()), (host, port, shown));
        }
    }

    #[test]
    fn what_is_no_collector() {
        for (text, why) in [
            ("127.0.0.1:4318", "must begin with http://"),
            ("localhost", "must begin with http://"),
            ("/v1/traces", "must begin with http://"),
            ("grpc://a:4317", "must begin with http://"),
            ("https://a:4318", "spans are sent without TLS"),
            ("http://a b", "must be a URL"),
            ("http://", "must be a URL"),
            ("http://:4318", "has no host"),
            ("http://u:p@a:4318", "must not have a user"),
            ("http://a:4318?x=1", "must not have a query"),
            ("http://a:4318/v1/traces/", "leave out /v1/traces"),
            ("http://a:70000", "must have a port"),
            ("http://a:", "must have a port"),
            ("http://[::1]:0", "must have a port"),
        ] {
            let said = Destination::parse(text).unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
