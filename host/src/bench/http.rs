//! A small HTTP/1.1 client: connections that are kept alive, one request on each at a time.

use std::sync::{Mutex, PoisonError};

use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

type Sender = SendRequest<Full<Bytes>>;

/// Longest part of an error's body that is told.
const TOLD: usize = 400;

pub struct Client {
    /// Host and port.
    authority: String,
    /// Before every path.
    prefix: String,
    authorization: Option<HeaderValue>,
    idle: Mutex<Vec<Sender>>,
}

/// An answer with its body still to be read.
pub struct Response<'a> {
    pub status: StatusCode,
    body: Incoming,
    sender: Sender,
    client: &'a Client,
}

impl Client {
    /// `url`: `http://HOST[:PORT][/PATH]`; a `/v1` at its end is left out, as paths have it.
    pub fn new(url: &str, key: Option<&str>) -> Result<Self, String> {
        let fault = |what: &str| format!("{url:?} {what}; give http://HOST:PORT");
        let uri: Uri = url.parse().map_err(|_| fault("is no URL"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(scheme) => return Err(fault(&format!("has the scheme {scheme}, which is not supported"))),
            None => return Err(fault("has no scheme")),
        }
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| fault("has no host"))?;
        // A port that is no number is not told apart from none.
        let port = uri.authority().and_then(|authority| authority.as_str().strip_prefix(host));
        if port.is_some_and(|port| !port.is_empty()) && uri.port_u16().is_none() {
            return Err(fault("has a port that is none"));
        }
        if uri.query().is_some() {
            return Err(fault("has a query"));
        }
        let path = uri.path().trim_end_matches('/');
        let authorization = key.map(|key| {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                .map_err(|_| "--api-key: has characters that no header may have".to_owned())?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        });
        Ok(Self {
            authority: format!("{host}:{}", uri.port_u16().unwrap_or(80)),
            prefix: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
            authorization: authorization.transpose()?,
            idle: Mutex::default(),
        })
    }

    /// A body that is sent as JSON, or none. Errors are one line.
    pub async fn send(&self, method: Method, path: &str, body: Option<String>) -> Result<Response<'_>, String> {
        let body = Bytes::from(body.unwrap_or_default());
        // The server may close a connection while it is idle; that shows when it is used, before anything was
        // answered, so the request goes out again on another.
        while let Some(mut sender) = self.take() {
            if sender.ready().await.is_err() {
                continue;
            }
            match sender.try_send_request(self.request(&method, path, body.clone())?).await {
                Ok(response) => return Ok(self.response(response, sender)),
                // It was never sent.
                Err(mut error) => match error.take_message() {
                    Some(_) => {}
                    None => return Err(format!("{}: {}", self.authority, chain(error.error()))),
                },
            }
        }
        let fault = |what: &str, error: &dyn std::error::Error| format!("{}: {what}: {}", self.authority, chain(error));
        let stream = TcpStream::connect(&self.authority).await.map_err(|e| fault("cannot connect", &e))?;
        stream.set_nodelay(true).map_err(|e| fault("TCP_NODELAY", &e))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|e| fault("cannot connect", &e))?;
        // Its end shows at the sender.
        tokio::spawn(async move { drop(connection.await) });
        let request = self.request(&method, path, body)?;
        let response = sender.send_request(request).await.map_err(|e| fault("no answer", &e))?;
        Ok(self.response(response, sender))
    }

    fn request(&self, method: &Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/json");
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        request.body(Full::new(body)).map_err(|e| format!("{path}: {e}"))
    }

    fn response(&self, response: hyper::Response<Incoming>, sender: Sender) -> Response<'_> {
        Response { status: response.status(), body: response.into_body(), sender, client: self }
    }

    fn take(&self) -> Option<Sender> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

impl Response<'_> {
    /// The next bytes of the body; `None` at its end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, String> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => return Err(format!("{}: {}", self.client.authority, chain(&error))),
            }
        }
    }

    /// The connection may be used again. Only after the end of the body.
    pub fn done(self) {
        self.client.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.sender);
    }

    /// The whole body of a success; the error has the status and the server's message.
    pub async fn whole(mut self) -> Result<Vec<u8>, String> {
        let mut body = Vec::new();
        while let Some(bytes) = self.chunk().await? {
            body.extend_from_slice(&bytes);
        }
        let status = self.status;
        self.done();
        if status.is_success() { Ok(body) } else { Err(refusal(status, &body)) }
    }
}

/// What a server says in place of an answer.
fn refusal(status: StatusCode, body: &[u8]) -> String {
    let json: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let message = json.as_ref().and_then(|json| json.pointer("/error/message").or(json.get("message"))?.as_str());
    let text = message.map_or_else(|| String::from_utf8_lossy(body).into_owned(), str::to_owned);
    let told: String = text.chars().take(TOLD).collect();
    format!("HTTP {status}: {told}")
}

/// An error with what caused it.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let parts = |url: &str| Client::new(url, None).map(|client| (client.authority, client.prefix));
        assert_eq!(parts("http://localhost:30000"), Ok(("localhost:30000".into(), String::new())));
        assert_eq!(parts("http://h/v1/"), Ok(("h:80".into(), String::new())));
        assert_eq!(parts("http://[::1]:8/proxy/v1"), Ok(("[::1]:8".into(), "/proxy".into())));
        for (url, message) in [
            ("localhost:30000", "has no scheme; give http://HOST:PORT"),
            ("https://h", "has the scheme https"),
            ("http://h?x=1", "has a query"),
            ("http://h:99999", "has a port that is none; give http://HOST:PORT"),
            ("h", "has no scheme"),
            ("http://h h", "is no URL"),
        ] {
            let error = parts(url).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        assert!(Client::new("http://h", Some("a\nb")).is_err_and(|error| error.starts_with("--api-key")));
    }

    /// Answers `answers` requests on each of two connections, then closes it.
    fn server(answers: usize) -> (String, std::thread::JoinHandle<()>) {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serve = move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                for _ in 0..answers {
                    let (mut request, mut byte) = (Vec::new(), [0]);
                    while !request.ends_with(b"\r\n\r\n") {
                        stream.read_exact(&mut byte).unwrap();
                        request.push(byte[0]);
                    }
                    assert!(String::from_utf8(request).unwrap().contains("authorization: Bearer k"));
                    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
                }
            }
        };
        (url, std::thread::spawn(serve))
    }

    #[test]
    fn connections_are_kept_and_replaced_where_they_were_closed() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for answers in [1, 2] {
            let (url, thread) = server(answers);
            let client = Client::new(&url, Some("k")).unwrap();
            runtime.block_on(async {
                for asked in 1..=2 * answers {
                    let body = client.send(Method::GET, "/", None).await.unwrap().whole().await.unwrap();
                    assert_eq!((body.as_slice(), client.idle.lock().unwrap().len()), (&b"ok"[..], 1));
                    while asked % answers == 0 && !client.idle.lock().unwrap()[0].is_closed() {
                        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                    }
                }
            });
            thread.join().unwrap();
        }
    }

    #[test]
    fn refusals_have_the_message_of_the_server() {
        let status = StatusCode::BAD_REQUEST;
        assert_eq!(refusal(status, b"{\"error\": {\"message\": \"no\"}}"), "HTTP 400 Bad Request: no");
        assert_eq!(refusal(status, b"plain"), "HTTP 400 Bad Request: plain");
    }
}
