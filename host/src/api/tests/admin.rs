//! The admin endpoints: who may use them, and what they answer.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::connections::exchange;
use super::fixture::{Options, Server, chat, json_of};
use crate::api::{Access, Refused, Reload, Reloaded, admin_router, serve_admin};
use crate::engine::RouteChanges;

const KEY: &str = "0123456789abcdef-one";
const OTHER: &str = "0123456789abcdef-two";

fn server(own_address: bool, keys: &[&str], work: fn() -> Result<Reloaded, Refused>) -> Server {
    let mut server = Server::saying("ok");
    let state = Arc::get_mut(&mut server.state).unwrap();
    state.access = Access::new(own_address, keys.iter().copied());
    state.reload = Some(Arc::new(Reload::new(work)));
    server
}

fn good() -> Result<Reloaded, Refused> {
    let routes = RouteChanges { added: vec!["a".into()], removed: vec!["b".into()], ..RouteChanges::default() };
    Ok(Reloaded { routes, models: vec!["large".into()] })
}

fn request(method: &str, path: &str, authorization: Option<&str>) -> Request<Body> {
    let request = Request::builder().method(method).uri(path);
    match authorization {
        Some(value) => request.header("authorization", value),
        None => request,
    }
    .body(Body::empty())
    .unwrap()
}

/// Status and answer of a request with this header, where everything is served.
async fn public(server: &Server, path: &str, authorization: Option<&str>) -> (u16, Value) {
    let method = if path == "/admin/reload" { "POST" } else { "GET" };
    json_of(server.send(request(method, path, authorization)).await).await
}

/// The same at the address of the admin endpoints.
async fn own(server: &Server, path: &str, authorization: Option<&str>) -> (u16, Value) {
    let method = if path == "/admin/reload" { "POST" } else { "GET" };
    let answer = admin_router(server.state.clone()).oneshot(request(method, path, authorization)).await.unwrap();
    json_of(answer).await
}

#[tokio::test]
async fn without_a_setting_there_are_no_admin_endpoints() {
    let server = server(false, &[], good);
    for path in ["/admin/reload", "/admin/routes"] {
        let (status, body) = public(&server, path, None).await;
        assert_eq!((status, &body["error"]["code"]), (404, &json!("not_found")));
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains("server.admin or server.admin_key"), "{message}");
    }
}

#[tokio::test]
async fn an_address_of_their_own_needs_no_key() {
    let server = server(true, &[], good);
    for path in ["/admin/reload", "/admin/routes"] {
        let (status, body) = public(&server, path, None).await;
        assert_eq!(status, 404);
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains("at the address of server.admin alone"), "{message}");
        assert_eq!(own(&server, path, None).await.0, 200);
    }
    // And nothing else is served there.
    assert_eq!(own(&server, "/v1/models", None).await.0, 404);
}

#[tokio::test]
async fn keys_are_asked_for_everywhere() {
    let server = server(true, &[KEY, OTHER], good);
    let bearer = |key: &str| format!("Bearer {key}");
    for bad in [
        None,
        Some(KEY.into()),
        Some(format!("Basic {KEY}")),
        Some(bearer("")),
        Some(bearer(&KEY[1..])),
        Some(bearer(&format!("{KEY}x"))),
    ] {
        for path in ["/admin/reload", "/admin/routes"] {
            let answers = [public(&server, path, bad.as_deref()).await, own(&server, path, bad.as_deref()).await];
            for (status, body) in answers {
                assert_eq!((status, &body["error"]["code"]), (401, &json!("invalid_admin_key")), "{bad:?}");
            }
        }
    }
    let refused = server.send(request("GET", "/admin/routes", None)).await;
    assert_eq!(refused.headers()["www-authenticate"], "Bearer");
    for key in [KEY, OTHER] {
        assert_eq!(public(&server, "/admin/routes", Some(&bearer(key))).await.0, 200);
        assert_eq!(own(&server, "/admin/reload", Some(&format!("bearer {key}"))).await.0, 200);
    }
}

#[tokio::test]
async fn what_a_reload_answers() {
    let (status, body) = own(&server(true, &[], good), "/admin/reload", None).await;
    let want = json!({"reloaded": true, "added": ["a"], "changed": [], "removed": ["b"], "unchanged": [], "models": ["large"]});
    assert_eq!((status, body), (200, want));
    let answer = async |work| {
        let (status, body) = own(&server(true, &[], work), "/admin/reload", None).await;
        (
            status,
            body["error"]["code"].as_str().unwrap().to_owned(),
            body["error"]["message"].as_str().unwrap().to_owned(),
        )
    };
    let refused = |status, code: &str, message: &str| (status, code.to_owned(), message.to_owned());
    assert_eq!(
        answer(|| Err(Refused::Config("c.toml:3: no".into()))).await,
        refused(400, "invalid_config", "c.toml:3: no")
    );
    assert_eq!(answer(|| Err(Refused::Restart("port".into()))).await, refused(409, "restart_needed", "port"));
    assert_eq!(answer(|| Err(Refused::Work("thread".into()))).await, refused(500, "internal_error", "thread"));
    assert_eq!(answer(|| Err(Refused::Hung("create".into()))).await, refused(503, "plugin_hung", "create"));
    let stopping = answer(|| Err(Refused::Stopping)).await;
    assert_eq!((stopping.0, stopping.1.as_str()), (503, "shutting_down"));
    let panicked = answer(|| panic!("inside")).await;
    assert_eq!((panicked.0, panicked.1.as_str()), (500, "internal_error"));
}

#[tokio::test]
async fn a_server_that_drains_reloads_nothing() {
    let server = server(true, &[], || panic!("it is not to begin"));
    server.state.start_draining();
    let (status, body) = own(&server, "/admin/reload", None).await;
    assert_eq!((status, &body["error"]["code"]), (503, &json!("shutting_down")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reloads_take_turns() {
    static BUSY: AtomicBool = AtomicBool::new(false);
    static DONE: AtomicUsize = AtomicUsize::new(0);
    let server = server(true, &[], || {
        assert!(!BUSY.swap(true, Ordering::SeqCst), "two at a time");
        std::thread::sleep(Duration::from_millis(5));
        BUSY.store(false, Ordering::SeqCst);
        DONE.fetch_add(1, Ordering::SeqCst);
        good()
    });
    let all: Vec<_> = (0..6)
        .map(|_| {
            let router = admin_router(server.state.clone());
            tokio::spawn(async move { router.oneshot(request("POST", "/admin/reload", None)).await.unwrap().status() })
        })
        .collect();
    for answer in all {
        assert_eq!(answer.await.unwrap(), 200);
    }
    assert_eq!(DONE.load(Ordering::SeqCst), 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_are_listed_until_they_have_drained() {
    let options = Options { pause: Duration::from_millis(2), ..Options::default() };
    let mut server = Server::with(&"one two three four ".repeat(8), options);
    Arc::get_mut(&mut server.state).unwrap().access = Access::new(true, []);
    let (_, before) = own(&server, "/admin/routes", None).await;
    let names: Vec<&str> = before["routes"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["pair", "small", "large"]);
    let pair = &before["routes"][0];
    assert_eq!(
        (&pair["plugin"], &pair["state"], &pair["requests"]),
        (&json!("ping-pong"), &json!("serving"), &json!(0))
    );
    assert_eq!((&pair["version"], &pair["sha256"]), (&Value::Null, &Value::Null));
    assert_eq!(pair["models"], json!([{"name": "small", "role": "slm"}, {"name": "large", "role": "llm"}]));
    let mut body = chat();
    body["stream"] = true.into();
    let running = server.post("/v1/chat/completions", body).await;
    server.state.engine.set_routes(Vec::new()).unwrap();
    let (_, during) = own(&server, "/admin/routes", None).await;
    let pair = &during["routes"][0];
    assert_eq!((&pair["name"], &pair["state"], &pair["requests"]), (&json!("pair"), &json!("draining"), &json!(1)));
    // New requests do not find it; the one under way ends as ever.
    let (status, body) = server.json("/v1/chat/completions", chat()).await;
    assert_eq!((status, &body["error"]["code"]), (404, &json!("model_not_found")));
    let text = super::fixture::text_of(running).await;
    assert!(text.contains("data: [DONE]") && !text.contains("\"error\""), "{text}");
    server.idle().await;
    while own(&server, "/admin/routes", None).await.1["routes"].as_array().unwrap().len() > 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_address_of_the_admin_endpoints() {
    let server = server(true, &[], good);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(serve_admin(listener, server.state.clone(), async { drop(ended.await) }));
    let text = "POST /admin/reload HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let answer = tokio::task::spawn_blocking(move || exchange(&mut TcpStream::connect(address).unwrap(), text, "\0"));
    let answer = answer.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"reloaded\":true"), "{answer}");
    drop(end);
    serving.await.unwrap();
    assert!(TcpStream::connect(address).is_err());
}
