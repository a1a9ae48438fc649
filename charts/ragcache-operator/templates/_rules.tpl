{{/* What the operator does in a namespace that it serves. */}}
{{- define "ragcache.rules" -}}
- apiGroups: [ragcache.dev]
  resources: [ragcaches, ragcollections]
  verbs: [get, list, watch, patch]
- apiGroups: [ragcache.dev]
  resources: [ragcaches/status, ragcollections/status]
  verbs: [patch]
# An owner reference that holds up its owner's deletion asks for this.
- apiGroups: [ragcache.dev]
  resources: [ragcaches/finalizers, ragcollections/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# The key that a RagCache's plans are sealed with: made once, and neither read nor changed after.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies, ingresses]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
# Claims are a StatefulSet's; the operator only ends them, where dataPolicy says so.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, delete]
# Why a part does not start, and how far a synchronisation is.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{/* What it needs wherever it serves, because these kinds have no namespace. */}}
{{- define "ragcache.clusterRules" -}}
{{- if .Values.webhook.enabled }}
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations, mutatingwebhookconfigurations]
  resourceNames: [{{ include "ragcache.webhookConfiguration" . }}]
  verbs: [get, update]
{{- end }}
{{- end -}}
