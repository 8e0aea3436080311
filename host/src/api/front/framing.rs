//! Whether a request's head leaves no doubt about where it ends. Pure.

use axum::http::{HeaderMap, StatusCode, Uri, Version, header};

use crate::api::error::ApiError;

/// Looks for a head with both `Content-Length` and `Transfer-Encoding`, whose body servers in a row may read
/// differently. The HTTP library drops the former before anyone else sees it.
///
/// It is fed everything that a connection brings, and does not know where a body ends and the next head begins. So it
/// looks for both names in lines without an empty one between them: no empty line is within a head, and each of a
/// head's fields begins a line. Bodies of JSON have no such lines, as names are quoted there.
#[derive(Clone, Debug, Default)]
pub struct Scanner {
    /// What the line begins with, in lower case, up to the longest name of interest and one byte more.
    line: Vec<u8>,
    /// The line's name is over.
    named: bool,
    length: bool,
    encoding: bool,
    ambiguous: bool,
}

const LENGTH: &[u8] = b"content-length";
const ENCODING: &[u8] = b"transfer-encoding";

impl Scanner {
    pub fn feed(&mut self, bytes: &[u8]) {
        for byte in bytes.iter().copied() {
            match byte {
                b'\r' => {}
                b'\n' => {
                    if self.line.is_empty() && !self.named {
                        (self.length, self.encoding) = (false, false);
                    }
                    self.line.clear();
                    self.named = false;
                }
                b':' if !self.named => {
                    self.length |= self.line == LENGTH;
                    self.encoding |= self.line == ENCODING;
                    self.ambiguous |= self.length && self.encoding;
                    self.named = true;
                }
                _ if self.named || self.line.len() > ENCODING.len() => {}
                byte => self.line.push(byte.to_ascii_lowercase()),
            }
        }
    }

    /// Whether there was one.
    pub fn ambiguous(&self) -> bool {
        self.ambiguous
    }
}

/// Sizes of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLimits {
    pub url_bytes: usize,
    pub headers: usize,
    pub header_bytes: usize,
}

/// Refuse what is too large.
pub fn sizes(uri: &Uri, headers: &HeaderMap, limits: HeadLimits) -> Result<(), ApiError> {
    let url = uri.path_and_query().map_or(0, |text| text.as_str().len());
    if url > limits.url_bytes {
        let most = limits.url_bytes;
        let message = format!("The URL has {url} bytes, more than {most} (server.max_url_bytes).");
        return Err(ApiError::new(StatusCode::URI_TOO_LONG, "url_too_long", message));
    }
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let large = |message| Err(ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message));
    if headers.len() > limits.headers {
        let (count, most) = (headers.len(), limits.headers);
        return large(format!("The request has {count} headers, more than {most} (server.max_headers)."));
    }
    if bytes > limits.header_bytes {
        let most = limits.header_bytes;
        return large(format!("The headers have {bytes} bytes, more than {most} (server.max_header_bytes)."));
    }
    Ok(())
}

/// Refuse a body that is sent in any other way than as it is, or chunked once. The HTTP library reads all that ends in
/// `chunked` as if nothing else had been done to it.
pub fn transfer(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let first = codings.next().map(|value| value.as_bytes().trim_ascii());
    if first.is_none_or(|coding| coding.eq_ignore_ascii_case(b"chunked")) && codings.next().is_none() {
        return Ok(());
    }
    let all = headers.get_all(header::TRANSFER_ENCODING).iter();
    let all: Vec<_> = all.map(|value| String::from_utf8_lossy(value.as_bytes())).collect();
    let message = format!(
        "The transfer encoding `{}` is not supported; send the body as it is, or `chunked` alone and once.",
        all.join(", ")
    );
    Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, "unsupported_transfer_encoding", message))
}

/// Refuse what can be read in two ways. `ambiguous` says that the body has two lengths.
pub fn unambiguous(version: Version, uri: &Uri, headers: &HeaderMap, ambiguous: bool) -> Result<(), ApiError> {
    let wrong = |message: &str| Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_request", message));
    if ambiguous {
        return wrong("Content-Length and Transfer-Encoding exclude each other; send one of them.");
    }
    match headers.get_all(header::HOST).iter().count() {
        0 if version >= Version::HTTP_11 && uri.authority().is_none() => wrong("The Host header is missing."),
        0 | 1 => Ok(()),
        _ => wrong("There is more than one Host header."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_lengths() {
        for (head, expected) in [
            ("POST / HTTP/1.1\r\ncontent-length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", true),
            ("POST / HTTP/1.1\r\nTRANSFER-ENCODING:chunked\r\nContent-Length:1\r\n\r\n", true),
            ("POST / HTTP/1.1\nTransfer-Encoding: chunked\nContent-Length: 1\n\n", true),
            ("POST / HTTP/1.1\r\ncontent-length: 1\r\nx-transfer-encoding: chunked\r\n\r\n", false),
            ("POST / HTTP/1.1\r\ncontent-length: 1\r\nx: transfer-encoding: chunked\r\n\r\n", false),
            ("POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\ntransfer-encoding: chunked\r\n", false),
            ("POST / HTTP/1.1\r\ncontent-lengthy: 1\r\ntransfer-encoding: chunked\r\n\r\n", false),
            // Empty lines before a head do not count.
            ("\r\nPOST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", true),
            ("\n\r\n\nPOST / HTTP/1.1\ncontent-length: 1\ntransfer-encoding: chunked\n\n", true),
            // One head after another, or after a body.
            ("GET / HTTP/1.1\r\n\r\nPOST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", true),
            ("{\n\n}POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", true),
            (
                "POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\n1POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
                false,
            ),
        ] {
            let mut whole = Scanner::default();
            whole.feed(head.as_bytes());
            let mut parts = Scanner::default();
            head.bytes().for_each(|byte| parts.feed(&[byte]));
            assert_eq!((whole.ambiguous(), parts.ambiguous()), (expected, expected), "{head}");
        }
    }

    #[test]
    fn transfer_encodings() {
        let check = |values: &[&'static str]| {
            let mut map = HeaderMap::new();
            for value in values {
                map.append(header::TRANSFER_ENCODING, value.parse().unwrap());
            }
            transfer(&map).map_err(|error| error.message)
        };
        for values in [&[][..], &["chunked"], &["Chunked"], &["chunked\t"]] {
            assert_eq!(check(values), Ok(()), "{values:?}");
        }
        for values in [
            &["gzip, chunked"][..],
            &["gzip", "chunked"],
            &["chunked, chunked"],
            &["chunked", "chunked"],
            &["chunked,"],
            &["chunked;a=b"],
            &["identity"],
            &[""],
        ] {
            let message = check(values).unwrap_err();
            assert!(message.contains(&format!("`{}`", values.join(", "))), "{message}");
        }
    }

    #[test]
    fn hosts() {
        let check = |version, hosts: &[&'static str]| {
            let mut map = HeaderMap::new();
            for host in hosts {
                map.append(header::HOST, host.parse().unwrap());
            }
            unambiguous(version, &Uri::from_static("/"), &map, false).is_ok()
        };
        assert!(check(Version::HTTP_11, &["a"]) && check(Version::HTTP_10, &[]));
        assert!(!check(Version::HTTP_11, &[]) && !check(Version::HTTP_11, &["a", "a"]));
    }

    #[test]
    fn too_large() {
        let limits = HeadLimits { url_bytes: 8, headers: 1, header_bytes: 20 };
        let status = |url: &'static str, pairs: &[(&'static str, &'static str)]| {
            let headers: HeaderMap = pairs.iter().map(|(k, v)| (k.parse().unwrap(), v.parse().unwrap())).collect();
            sizes(&Uri::from_static(url), &headers, limits).map_err(|error| error.status.as_u16())
        };
        assert_eq!(status("/1234567", &[("a", "b")]), Ok(()));
        assert_eq!(status("/12345678", &[]), Err(414));
        assert_eq!(status("/?1234567", &[]), Err(414));
        assert_eq!(status("/", &[("a", "b"), ("c", "d")]), Err(431));
        assert_eq!(status("/", &[("a", "0123456789abcdef")]), Err(431));
    }
}
