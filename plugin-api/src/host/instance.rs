//! One instance of a plugin's policy, behind safe functions.

use std::panic::{AssertUnwindSafe, catch_unwind};

use abi_stable::std_types::{ROption, RResult, RStr, RString, RVec};

use crate::abi::RootRef;
use crate::abi::net::RawWeights;
use crate::abi::raw::{RawBatch, RawContext, RawModel, RawPeer, RawRequest, RawServices};
use crate::{
    Acceptance, Context, Decision, Handoff, LogLevel, ModelIndex, PeerView, RequestView, Requirements, RouteBatch,
    Services, Slot,
};

/// An instance. After an error it must not be called again, except to close it.
pub struct Instance {
    root: RootRef,
    /// Null once closed.
    state: *mut (),
}

// SAFETY: a `Policy` is `Send`, and the functions of the root are not bound to a thread.
unsafe impl Send for Instance {}

fn answer<T, U>(raw: RResult<T, RString>) -> Result<U, String>
where
    U: TryFrom<T>,
    U::Error: std::fmt::Display,
{
    match raw {
        RResult::ROk(value) => U::try_from(value).map_err(|e| e.to_string()),
        RResult::RErr(message) => Err(message.to_string()),
    }
}

// SAFETY of every call through `root`: `state` is alive (only `close` ends it, and it leaves null, which
// `state()` refuses), `&mut self` keeps calls apart, and views live until the call returns.
impl Instance {
    pub(super) fn create(root: RootRef, context: &Context<'_>, settings: &str) -> Result<Self, String> {
        let models: Vec<_> = context
            .models
            .iter()
            .map(|m| RawModel { name: m.name.as_str().into(), role: m.role.as_str().into() })
            .collect();
        let raw = RawContext {
            route: context.route.into(),
            models: models.as_slice().into(),
            eos: context.eos.into(),
            model: context.model,
            entry: context.entry,
            vocab_size: context.vocab_size,
            services: services(&context.services),
        };
        let state = answer(unsafe { root.create()(&raw, settings.into()) })?;
        Ok(Self { root, state })
    }

    fn state(&self) -> Result<*mut (), String> {
        if self.state.is_null() { Err("the instance is closed".to_owned()) } else { Ok(self.state) }
    }

    /// See [`Policy::requirements`](crate::Policy::requirements).
    pub fn requirements(&mut self) -> Result<Requirements, String> {
        answer(unsafe { self.root.requirements()(self.state()?) })
    }

    /// See [`Policy::entry`](crate::Policy::entry).
    pub fn entry(&mut self, request: &RequestView<'_>) -> Result<Option<ModelIndex>, String> {
        answer(unsafe { self.root.entry()(self.state()?, &RawRequest::new(request)) })
    }

    /// See [`Policy::route`](crate::Policy::route).
    pub fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) -> Result<(), String> {
        answer(unsafe { self.root.route()(self.state()?, &RawBatch::new(batch), out.into()) })
    }

    /// See [`Policy::send`](crate::Policy::send).
    pub fn send(&mut self, request: &RequestView<'_>, to: ModelIndex) -> Result<Handoff, String> {
        answer(unsafe { self.root.send()(self.state()?, &RawRequest::new(request), to) })
    }

    /// See [`Policy::receive`](crate::Policy::receive).
    pub fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Result<Acceptance, String> {
        answer(unsafe { self.root.receive()(self.state()?, &RawRequest::new(request), &RawPeer::new(message)) })
    }

    /// See [`Policy::finished`](crate::Policy::finished).
    pub fn finished(&mut self, slot: Slot) -> Result<(), String> {
        answer(unsafe { self.root.finished()(self.state()?, slot) })
    }

    /// Drop the policy. Closing twice is closing once.
    pub fn close(&mut self) -> Result<(), String> {
        match std::mem::replace(&mut self.state, std::ptr::null_mut()) {
            state if state.is_null() => Ok(()),
            state => answer(unsafe { self.root.destroy()(state) }),
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Who wants to know of a failure calls `close` before.
        let _ = self.close();
    }
}

fn services(services: &&dyn Services) -> RawServices {
    RawServices { data: std::ptr::from_ref(services).cast(), token_bytes, token_id, weights, log, get_extension }
}

/// # Safety
/// `data` is from [`services`], and what it was made from lives.
unsafe fn with<T>(data: *const (), body: impl FnOnce(&dyn Services) -> T) -> Option<T> {
    // SAFETY: the caller's promise.
    let services = unsafe { *data.cast::<&dyn Services>() };
    // A panic must not cross into the plugin; the panic hook of this program has reported it.
    catch_unwind(AssertUnwindSafe(|| body(services))).ok()
}

// SAFETY of `with` in each function below: a plugin passes `data` back as it got it, while `create` runs.

unsafe extern "C" fn token_bytes(data: *const (), id: u32) -> ROption<RVec<u8>> {
    unsafe { with(data, |s| s.token_bytes(id)) }.flatten().map(RVec::from).into()
}

unsafe extern "C" fn token_id(data: *const (), text: RStr<'_>) -> ROption<u32> {
    unsafe { with(data, |s| s.token_id(text.as_str())) }.flatten().into()
}

unsafe extern "C" fn weights(data: *const (), path: RStr<'_>) -> RResult<RawWeights, RString> {
    match unsafe { with(data, |s| s.weights(path.as_str())) } {
        Some(Ok(info)) => RResult::ROk(info.into()),
        Some(Err(message)) => RResult::RErr(message.into()),
        None => RResult::RErr("the host failed to read the file; see its log".into()),
    }
}

unsafe extern "C" fn log(data: *const (), level: u32, message: RStr<'_>) {
    let level = match level {
        0 => LogLevel::Error,
        1 => LogLevel::Warn,
        2 => LogLevel::Info,
        _ => LogLevel::Debug,
    };
    unsafe { with(data, |s| s.log(level, message.as_str())) };
}

/// This version has no extension.
unsafe extern "C" fn get_extension(_data: *const (), _id: RStr<'_>) -> *const () {
    std::ptr::null()
}
